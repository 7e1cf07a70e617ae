"""Algorithms as a user writes them: one class each, with every default on its field."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BeforeValidator, Field, model_validator

from flexrlhf.config.presets.filling import PEERS, Like, filled_algorithm
from flexrlhf.config.rows import FILES, TextForm
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import shown


class AlgorithmSpec(StrictModel):
    """Settings of every algorithm: the size of a step and of its mini-batches."""

    like: Like | None = Field(
        None, description="engine or paper whose trainer's defaults stand where nothing is written"
    )
    prompts_per_step: int = Field(32, ge=1, description="prompts of one training step, over all replicas")
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per epoch of one step")
    epochs: int = Field(1, ge=1, description="passes over the rows of one step")

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose rows one step trains on."""
        return self.prompts_per_step

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        return cls.with_preset(value) if isinstance(value, dict) else value

    @classmethod
    def with_preset(cls, written: dict[str, Any]) -> dict[str, Any]:
        """Return what is ``written`` with the preset ``like`` where nothing is, as yet unvalidated."""
        like = written.get("like")
        if not isinstance(like, str) or like not in PEERS:
            return written
        return filled_algorithm(written, {name: field.default for name, field in cls.model_fields.items()})

    @model_validator(mode="after")
    def _mini_batches_have_rows(self) -> Self:
        if self.num_mini_batches > self.prompts_per_step:
            raise ValueError(
                f"num_mini_batches {self.num_mini_batches} exceeds prompts_per_step {self.prompts_per_step}: "
                f"use at most {self.prompts_per_step}"
            )
        return self


LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class TruncationPenalty(StrictModel):
    """Rule that lowers the score of truncated responses."""

    penalty: float = Field(description="subtracted from the score of a truncated response")


TruncationWord = Literal["none", "bootstrap", "mask"]


def _truncation(value: Any) -> Any:
    """Refuse what is no form of it; the message of a union would name one form only."""
    words = get_args(TruncationWord)
    if isinstance(value, dict | TruncationPenalty) or value in words:
        return value
    forms = ", ".join(map(repr, words))
    raise ValueError(f"expected {forms} or a mapping such as {{penalty: 1.0}}, found {shown(value)}")


def _as_list(value: Any) -> Any:
    """Make a list of one text."""
    return (value,) if isinstance(value, str) else value


Truncation = Annotated[TruncationWord | TruncationPenalty, BeforeValidator(_truncation)]


StopStrings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)]


class ImportanceSpec(StrictModel):
    """Truncated importance sampling (Ionides 2008; Espeholt et al. 2018): corrects for responses of another policy.

    Weight = min(pi_old / pi_rollout, cap) of each token, or of the whole response; pi_old: the weights that training of
    the step starts from, pi_rollout: the distribution that the response was sampled from.
    """

    level: Literal["token", "sequence"] = Field("token", description="one weight a token, or one a response")
    cap: float = Field(2.0, ge=1, description="largest weight")


class SampledSpec(AlgorithmSpec):
    """Settings of algorithms that generate: how responses are sampled, and the correction for another policy's."""

    samples_per_prompt: int = Field(1, ge=1, description="responses to each prompt")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it, too")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the most likely tokens of this total probability")
    top_k: int = Field(0, ge=0, description="sample from this many most likely tokens; 0: from all")
    min_response_tokens: int = Field(0, ge=0, description="no end token before this many tokens")
    stop: StopStrings = Field(
        (), description="strings that end a response, of which they stay a part; compared without special tokens"
    )
    importance: ImportanceSpec | None = Field(None, description="null: no importance weights")

    @property
    def is_cut(self) -> bool:
        """Whether responses are sampled from a part of the policy's distribution, so that their log-probs differ."""
        return self.top_p < 1 or self.top_k > 0 or self.min_response_tokens > 0

    @model_validator(mode="after")
    def _cuts_are_corrected(self) -> Self:
        if self.is_cut and self.importance is None:
            name, plain = next(
                (name, plain)
                for name, plain in (("top_p", 1), ("top_k", 0), ("min_response_tokens", 0))
                if getattr(self, name) != plain
            )
            raise ValueError(
                f"{name} {getattr(self, name):g} samples from another distribution than the policy's; "
                f"use {plain}, or correct for it with importance: {{}}"
            )
        return self


KlEstimator = Literal["k1", "k2", "k3"]
K3_LIMIT = 10.0
"""Largest k3 estimate of a token: one of log-ratio -20 would be 4.9e8. verl 0.9.1 and OpenRLHF 0.11.2 have the same."""


class KlSpec(StrictModel):
    """KL penalty that keeps the policy near the reference model; beta = ``coefficient``.

    ``estimator`` of KL(policy || ref) from r = log policy - log ref of a sampled token (Schulman 2020): k1 = r,
    k2 = r^2 / 2, k3 = exp(-r) - 1 + r; in the loss k3 by default, since the gradient of k1 is 0 in the mean.
    ``place: advantages``: of algorithms whose scores are compared within a group; a token's advantage falls by the
    penalties of itself and of the tokens after it, once scores are compared and scaled.
    ``target``: beta follows the measured KL (Ziegler et al. 2019, section 2.2), from step to step:
    beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * responses / horizon.
    """

    place: Literal["reward", "advantages", "loss"] = Field(
        "reward", description="subtracted from the rewards, or from the advantages of a group; or added to the loss"
    )
    coefficient: float = Field(0.05, ge=0, description="beta; with a target, that of the first step")
    estimator: KlEstimator = Field("k1", description="with place loss k3 by default")
    clamp: float | None = Field(None, gt=0, description="r is clamped to [-clamp, clamp]; null: it is not")
    value_clamp: float | None = Field(
        None,
        gt=0,
        description="the estimate is clamped to [-value_clamp, value_clamp], beyond which it has no gradient; null: it "
        "is not; of k3 10 by default",
    )
    target: float | None = Field(None, gt=0, description="KL in nats; null: the coefficient is fixed")
    target_unit: Literal["response", "token"] = Field(
        "response",
        description="KL that target is of: response: sum of r over a response; token: mean of the estimate over its "
        "tokens; of either the mean over responses",
    )
    horizon: int = Field(10000, ge=1, description="responses over which an adaptive coefficient follows")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_place(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("place") == "loss":
            value = {"estimator": "k3", **value}
        return {"value_clamp": K3_LIMIT, **value} if value.get("estimator") == "k3" else value

    @model_validator(mode="after")
    def _adaptive_where_it_is_measured(self) -> Self:
        if self.target is not None and self.place == "loss":
            raise ValueError("target adapts a penalty in the reward; use place: reward, or remove target")
        return self


def penalty_over(default: KlSpec, written: dict[str, Any]) -> dict[str, Any]:
    """Return a KL penalty with what is ``written`` over ``default``; another place does not inherit its estimator."""
    moved = written.get("place", default.place) != default.place
    left_out = {"value_clamp", *(["estimator"] if moved else [])}
    return {**{key: value for key, value in default if key not in left_out}, **written}


class OverlongSpec(StrictModel):
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13).

    The score falls by up to ``penalty`` over the last ``buffer_tokens`` of the largest response length.
    """

    buffer_tokens: int | None = Field(None, ge=1, description="null: a fifth of data.max_response_tokens, as there")
    penalty: float = Field(1.0, gt=0, description="subtracted from the score at the largest length")


class PtxSpec(StrictModel):
    """Pretraining loss in addition to the policy's (Ouyang et al. 2022, section 3.5).

    In every optimizer step of the actor, ``coefficient`` times the negative log-likelihood of as many texts as it has
    responses, at temperature 1. Texts are truncated to the lengths of ``data``, as responses are.
    """

    path: str = Field(description=FILES)
    form: TextForm = Field("auto", description="columns of a row; auto: follows from the first row")
    columns: dict[str, str] = Field(default_factory=dict, description="name that the form uses: column of the rows")
    coefficient: float = Field(1.0, gt=0, description="factor of this loss")


class PolicySpec(SampledSpec):
    """Settings of algorithms that train on sampled responses with a clipped policy gradient."""

    kl: KlSpec | None = Field(KlSpec(), description="null: no penalty, and no reference model is placed")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped to at least 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped to at most 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="largest ratio where the advantage is negative; null: no limit"
    )
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: one ratio of the whole response (GSPO)")
    entropy_coefficient: float = Field(0.0, ge=0, description="factor of the entropy bonus in the loss")
    loss_aggregation: LossAggregation = Field("token-mean", description="from the losses of tokens to that of a batch")
    reward_clip: float | None = Field(
        None, gt=0, description="scores are clipped to [-reward_clip, reward_clip]; null: not clipped"
    )
    normalise_scores: Literal["none", "running", "batch"] = Field(
        "none", description="to mean 0, deviation 1: running: of the steps before; batch: of the step's responses"
    )
    invalid_scores: Literal["mask", "stop"] = Field(
        "mask", description="NaN and infinite scores: mask: the response is left out; stop: the run ends"
    )
    truncation: Truncation = Field(
        "none",
        description="responses without end token: none: scored as they are; bootstrap: the critic's value is added; "
        "mask: left out; {penalty: p}: score - p",
    )
    overlong: OverlongSpec | None = Field(None, description="null: no punishment of long responses")
    rollouts_per_step: int = Field(1, ge=1, description="batches of prompts_per_step prompts in one training step")
    freeze_actor_steps: int = Field(0, ge=0, description="steps at the start in which the actor is not trained")
    ptx: PtxSpec | None = Field(None, description="null: no pretraining loss")

    @property
    def num_prompts(self) -> int:
        return self.prompts_per_step * self.rollouts_per_step

    @classmethod
    def with_preset(cls, written: dict[str, Any]) -> dict[str, Any]:
        """Return what is ``written`` with the preset where nothing is; the algorithm's own penalty completes a part."""
        value = super().with_preset(written)
        default, penalty = cls.model_fields["kl"].default, value.get("kl")
        if isinstance(default, KlSpec) and isinstance(penalty, dict):
            return {**value, "kl": penalty_over(default, penalty)}
        return value

    @model_validator(mode="after")
    def _penalty_has_a_place(self) -> Self:
        if self.kl is not None and self.kl.place == "advantages" and not isinstance(self, GroupSpec):
            raise ValueError(
                "kl.place advantages goes with scores that are compared within a group (grpo, rloo, gspo); use reward"
            )
        return self

    @model_validator(mode="after")
    def _coefficient_keeps_its_sign(self) -> Self:
        responses = self.num_prompts * self.samples_per_prompt
        if self.kl is not None and self.kl.target is not None and responses >= 5 * self.kl.horizon:
            raise ValueError(
                f"kl.horizon {self.kl.horizon} is too short for the {responses} responses of a step, which could turn "
                f"the coefficient negative: use at least {responses // 5 + 1}"
            )
        return self


class PpoSpec(PolicySpec):
    """Proximal policy optimization (Schulman et al. 2017), GAE, a KL penalty in the reward (Ouyang et al. 2022)."""

    name: Literal["ppo"] = "ppo"
    gamma: float = Field(1.0, gt=0, le=1, description="discount of rewards, per token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    value_clip: float | None = Field(
        0.2, gt=0, description="largest change of a value in the value loss; null: values are not clipped"
    )
    whiten: Literal["batch", "mini_batch", "none"] = Field(
        "batch", description="advantages to mean 0, deviation 1 over the step or a mini-batch"
    )


class AcShareSpec(PpoSpec):
    """PPO with actor and critic on one trunk (Schulman et al. 2017, eq. 9): one optimizer, one loss of both."""

    name: Literal["ac-share"] = "ac-share"  # type: ignore[assignment]
    value_coefficient: float = Field(0.5, ge=0, description="factor of the value loss, which is added to the policy's")
    freeze_actor_steps: Literal[0] = 0


class DynamicSamplingSpec(StrictModel):
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2).

    ``rounds`` times as many groups are sampled as a step trains on; those whose responses all have the same score are
    left out. The number of rounds is fixed, so that it can be planned: a mini-batch with more groups than its share
    trains on the first of them, one with fewer on fewer.
    """

    rounds: int = Field(2, ge=2, description="groups that are sampled for each that is trained on")


class GroupSpec(PolicySpec):
    """Settings of algorithms that compare the responses to one prompt, without a critic."""

    samples_per_prompt: int = Field(8, ge=1, description="responses to each prompt: the size of a group")
    baseline: Literal["mean", "others"] = Field(
        "mean", description="mean score of the group, or of its other responses"
    )
    scale: Literal["group", "none"] = Field("group", description="group: divide by the group's standard deviation")
    dynamic_sampling: DynamicSamplingSpec | None = Field(None, description="null: all groups are trained on")

    @property
    def num_prompts(self) -> int:
        rounds = 1 if self.dynamic_sampling is None else self.dynamic_sampling.rounds
        return rounds * super().num_prompts

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        if self.samples_per_prompt == 1:
            raise ValueError(
                "samples_per_prompt 1: a single response has no others to be compared with; use at least 2"
            )
        return self

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return _without_values(self)


Policy = TypeVar("Policy", bound=PolicySpec)


def _without_values(spec: Policy) -> Policy:
    """Return ``spec``; raise ValueError for a setting that needs a critic."""
    if spec.truncation == "bootstrap":
        raise ValueError("truncation: bootstrap needs the values of a critic; use none, mask or a penalty")
    return spec


class GrpoSpec(GroupSpec):
    """Group relative policy optimization (DeepSeekMath, Shao et al. 2024, section 4.1), outcome supervision.

    ``like: dr-grpo`` and ``like: dapo`` are its later forms.
    """

    name: Literal["grpo"] = "grpo"
    kl: KlSpec | None = KlSpec(place="loss", coefficient=0.04, estimator="k3")
    loss_aggregation: LossAggregation = "seq-mean-token-mean"


class RlooSpec(GroupSpec):
    """REINFORCE with the others' mean as baseline (Ahmadian et al. 2024, eq. 9): a response is one action."""

    name: Literal["rloo"] = "rloo"
    samples_per_prompt: int = Field(4, ge=1)
    baseline: Literal["mean", "others"] = "others"
    scale: Literal["group", "none"] = "none"
    loss_aggregation: LossAggregation = "seq-mean-token-sum"


class GspoSpec(GroupSpec):
    """Group sequence policy optimization (Zheng et al. 2025): the ratio of whole responses, clipped narrowly."""

    name: Literal["gspo"] = "gspo"
    kl: KlSpec | None = None
    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    clip_high: float = Field(4e-4, gt=0)
    loss_aggregation: LossAggregation = "seq-mean-token-mean"


class RaftSpec(PolicySpec):
    """Reward-ranked fine-tuning (Dong et al. 2023): only the response with the best score of each group is trained on.

    Its advantage is 1.
    """

    name: Literal["raft"] = "raft"
    samples_per_prompt: int = Field(8, ge=2)
    kl: KlSpec | None = None

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return _without_values(self)


class ReturnsSpec(PolicySpec):
    """Settings of algorithms whose advantages are the returns of a token minus a baseline, without a critic."""

    gamma: float = Field(1.0, gt=0, le=1, description="discount of rewards, per token")
    whiten: Literal["batch", "none"] = Field("batch", description="advantages to mean 0, deviation 1 over the step")

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return _without_values(self)


class ReinforceSpec(ReturnsSpec):
    """REINFORCE++ (Hu 2025): PPO's clip and penalty per token, no critic, advantages whitened over the whole batch."""

    name: Literal["reinforce++"] = "reinforce++"
    kl: KlSpec | None = KlSpec(coefficient=0.01)
    baseline: Literal["none", "group"] = Field("none", description="group: the mean score of the prompt's responses")

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        if self.baseline == "group" and self.samples_per_prompt == 1:
            raise ValueError("baseline: group needs several responses to a prompt; use samples_per_prompt 2 or more")
        return self


class RemaxSpec(ReturnsSpec):
    """ReMax (Li et al. 2023): the score of the greedy response to the same prompt is the baseline."""

    name: Literal["remax"] = "remax"
    samples_per_prompt: Literal[1] = 1
    normalise_scores: Literal["none", "running"] = "none"
    whiten: Literal["batch", "none"] = "none"


class LagrangeSpec(StrictModel):
    """Lagrange multiplier of the limit on the cost, by gradient ascent on its logarithm (Dai et al. 2024, eq. 12).

    log lambda += learning_rate * lambda * (mean cost of a step's responses - limit).
    """

    limit: float = Field(0.0, description="the mean cost is to stay below it")
    initial: float = Field(1.0, gt=0, description="lambda of the first step")
    learning_rate: float = Field(0.1, ge=0, description="of log lambda")
    maximum: float | None = Field(5.0, gt=0, description="largest lambda; null: no limit")

    @model_validator(mode="after")
    def _starts_within(self) -> Self:
        if self.maximum is not None and self.initial > self.maximum:
            raise ValueError(f"initial {self.initial:g} exceeds maximum {self.maximum:g}")
        return self


class SafeRlhfSpec(PpoSpec):
    """Safe RLHF (Dai et al. 2024): PPO for the reward while the mean cost stays under a limit, with a critic for each.

    The rules for scores (truncation, clip, ...) are for the reward; costs are taken as they are.
    """

    name: Literal["safe-rlhf"] = "safe-rlhf"  # type: ignore[assignment]
    lagrange: LagrangeSpec = LagrangeSpec()


class SftSpec(AlgorithmSpec):
    """Supervised fine-tuning: the negative log-likelihood of the responses."""

    name: Literal["sft"] = "sft"
    samples_per_prompt: Literal[1] = 1
    loss_aggregation: LossAggregation = "token-mean"


class RewardSpec(AlgorithmSpec):
    """Reward model on preference pairs (Ouyang et al. 2022, eq. 1). A pair is one prompt with two samples."""

    name: Literal["reward"] = "reward"
    samples_per_prompt: Literal[2] = 2


class DpoSpec(AlgorithmSpec):
    """Direct preference optimization (Rafailov et al. 2023, eq. 7) on pairs. A pair is one prompt with two samples."""

    name: Literal["dpo"] = "dpo"
    samples_per_prompt: Literal[2] = 2
    beta: float = Field(0.1, gt=0, description="strength of the implicit KL penalty")
    loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="ipo: squared distance of the log-ratios' difference to 1 / (2 beta) (Azar et al. 2024, eq. 17)",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs with the labels swapped (cDPO, Mitchell 2023); sigmoid only"
    )

    @model_validator(mode="after")
    def _smoothing_of_sigmoid(self) -> Self:
        if self.label_smoothing and self.loss == "ipo":
            raise ValueError(f"label_smoothing {self.label_smoothing:g} goes with loss: sigmoid; ipo needs none: use 0")
        return self


GroupAlgorithm = GrpoSpec | RlooSpec | GspoSpec | RaftSpec
PolicyAlgorithm = PpoSpec | AcShareSpec | GroupAlgorithm | ReinforceSpec | RemaxSpec | SafeRlhfSpec
AnyAlgorithm = PolicyAlgorithm | DpoSpec | SftSpec | RewardSpec
Algorithm = Annotated[AnyAlgorithm, Field(discriminator="name")]
ALGORITHMS: tuple[str, ...] = tuple(kind.model_fields["name"].default for kind in get_args(AnyAlgorithm))
_CLASSES: dict[str, type[AlgorithmSpec]] = dict(zip(ALGORITHMS, get_args(AnyAlgorithm), strict=True))


def with_preset(written: Any) -> dict[str, Any] | None:
    """Return the settings of ``algorithm`` with its preset filled in; None where it names none that exists for it."""
    if not isinstance(written, dict) or not isinstance(written.get("like"), str):
        return None
    name, peer = written.get("name"), PEERS.get(written["like"])
    return _CLASSES[str(name)].with_preset(written) if peer is not None and name in peer.trainers else None
