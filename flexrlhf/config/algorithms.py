"""What a user may write of an algorithm: one class each, with every default on its field."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BeforeValidator, Field, model_validator

from flexrlhf.config.presets import OF_GRPO, PRESETS, Like, penalty_over, with_preset
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.errors import shown


class AlgorithmSpec(StrictModel):
    """What all algorithms have: the size of a step and of its mini-batches."""

    prompts_per_step: int = Field(32, ge=1)
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per epoch of one step")
    epochs: int = Field(1, ge=1, description="passes over the rows of one step")

    @property
    def num_prompts(self) -> int:
        """Prompts whose rows one step trains on."""
        return self.prompts_per_step

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
    penalty: float = Field(description="subtracted from the score of an answer that was cut off")


TruncationWord = Literal["none", "bootstrap", "mask"]


def _truncation(value: Any) -> Any:
    """Refuse here what is no form of it, since a union would tell of one form only."""
    words = get_args(TruncationWord)
    if isinstance(value, dict | TruncationPenalty) or value in words:
        return value
    forms = ", ".join(map(repr, words))
    raise ValueError(f"expected {forms} or a mapping such as {{penalty: 1.0}}, found {shown(value)}")


def _listed(value: Any) -> Any:
    """One text is a list of one."""
    return (value,) if isinstance(value, str) else value


Truncation = Annotated[TruncationWord | TruncationPenalty, BeforeValidator(_truncation)]


StopStrings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)]


class ImportanceSpec(StrictModel):
    """Truncated importance sampling (Ionides 2008; Espeholt et al. 2018): the loss of what another policy drew.

    Weight = min(pi_old / pi_rollout, cap) of each token, or of the whole answer; pi_old: the weights that training of
    the step starts from, pi_rollout: what the answer was drawn with.
    """

    level: Literal["token", "sequence"] = "token"
    cap: float = Field(2.0, ge=1)


class SampledSpec(AlgorithmSpec):
    """What algorithms that generate have: how answers are drawn, and what is done when another policy drew them."""

    samples_per_prompt: int = Field(1, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens of this probability together")
    top_k: int = Field(0, ge=0, description="draw from so many likeliest tokens; 0: from all")
    min_response_tokens: int = Field(0, ge=0, description="no end token before so many")
    stop: StopStrings = Field((), description="texts that end an answer, which keeps them; without special tokens")
    importance: ImportanceSpec | None = None

    @property
    def is_cut(self) -> bool:
        """Whether answers are drawn from less than the policy's distribution, so that their log-probs differ."""
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
                f"{name} {getattr(self, name):g} draws answers from another distribution than the policy's; "
                f"use {plain}, or correct for it with importance: {{}}"
            )
        return self


class KlSpec(StrictModel):
    """The penalty for leaving the reference policy; beta = ``coefficient``.

    ``estimator`` of KL(policy || ref) from r = log policy - log ref of a drawn token (Schulman 2020): k1 = r,
    k2 = r^2 / 2, k3 = exp(-r) - 1 + r; in the loss k3 unless another is asked for, since the gradient of k1 is 0 in the
    mean. ``target``: beta follows the measured KL of an answer (Ziegler et al. 2019, section 2.2), from step to step:
    beta *= 1 + clip(KL / target - 1, -0.2, 0.2) * answers / horizon.
    """

    place: Literal["reward", "loss"] = "reward"
    coefficient: float = Field(0.05, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k1"
    clamp: float | None = Field(None, gt=0, description="of r, to both sides; None: as it is")
    target: float | None = Field(None, gt=0, description="nats an answer; None: the coefficient is fixed")
    horizon: int = Field(10000, ge=1, description="answers over which an adaptive coefficient follows")

    @model_validator(mode="before")
    @classmethod
    def _estimator_of_a_loss(cls, value: Any) -> Any:
        is_loss = isinstance(value, dict) and value.get("place") == "loss"
        return {"estimator": "k3", **value} if is_loss else value

    @model_validator(mode="after")
    def _adaptive_in_the_reward(self) -> Self:
        if self.target is not None and self.place == "loss":
            raise ValueError("target adapts a penalty in the reward; use place: reward, or remove target")
        return self


class OverlongSpec(StrictModel):
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13): the score falls by up to ``penalty`` over the last
    ``buffer_tokens`` of the largest length of an answer."""

    buffer_tokens: int | None = Field(None, ge=1, description="None: a fifth of data.max_response_tokens, as there")
    penalty: float = Field(1.0, gt=0)


class PtxSpec(StrictModel):
    """Further pretraining beside the policy's loss (Ouyang et al. 2022, section 3.5): in every optimizer step of the
    actor, ``coefficient`` times the negative log-likelihood of as many texts as it has answers, at temperature 1. Texts
    are cut to the lengths of ``data``, as answers are."""

    path: str
    form: Literal["auto", "prompt", "instruction", "question", "text"] = "auto"
    coefficient: float = Field(1.0, gt=0)


class PolicySpec(SampledSpec):
    """What algorithms have that raise the score of drawn answers by a clipped policy gradient."""

    like: Like | None = Field(None, description="what is not written is as in that engine or paper")
    kl: KlSpec | None = Field(KlSpec(), description="None: no penalty, and no reference model is placed")
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float | None = Field(None, gt=1, description="bound of the ratio where the advantage is negative")
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: one of the whole answer (GSPO)")
    entropy_coefficient: float = Field(0.0, ge=0)
    loss_aggregation: LossAggregation = "token-mean"
    reward_clip: float | None = Field(None, gt=0, description="None: scores are not clipped")
    normalise_scores: Literal["none", "running", "batch"] = Field(
        "none", description="to mean 0, deviation 1: running: of the steps before; batch: of the step's answers"
    )
    invalid_scores: Literal["mask", "stop"] = Field(
        "mask", description="NaN and infinite ones: mask: the answer counts for nothing; stop: the run ends"
    )
    truncation: Truncation = "none"
    overlong: OverlongSpec | None = None
    rollouts_per_step: int = Field(1, ge=1, description="of prompts_per_step prompts each, before the model trains")
    freeze_actor_steps: int = Field(0, ge=0, description="steps at the start in which the actor is not trained")
    ptx: PtxSpec | None = None

    @property
    def num_prompts(self) -> int:
        return self.prompts_per_step * self.rollouts_per_step

    DEFINING: ClassVar[frozenset[str]] = frozenset()
    """Settings that make the algorithm what it is, which no engine's preset changes."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """A preset below what is written; a part of a penalty is over the algorithm's own."""
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("like"), str) and value["like"] in PRESETS:
            value = with_preset(value, cls.model_fields.keys() - cls.DEFINING)
        own, written = cls.model_fields["kl"].default, value.get("kl")
        if isinstance(own, KlSpec) and isinstance(written, dict):
            value = {**value, "kl": penalty_over(own.model_dump(), written)}
        return value

    @model_validator(mode="after")
    def _forms_of_grpo(self) -> Self:
        if self.like in OF_GRPO and not isinstance(self, GroupSpec):
            raise ValueError(f"like: {self.like} is a form of grpo; use that algorithm, or remove like")
        return self

    @model_validator(mode="after")
    def _coefficient_keeps_its_sign(self) -> Self:
        answers = self.num_prompts * self.samples_per_prompt
        if self.kl is not None and self.kl.target is not None and answers >= 5 * self.kl.horizon:
            raise ValueError(
                f"kl.horizon {self.kl.horizon} is too short for the {answers} answers of a step, which could turn the "
                f"coefficient negative: use at least {answers // 5 + 1}"
            )
        return self


class PpoSpec(PolicySpec):
    """Proximal Policy Optimization (Schulman et al. 2017), GAE, a KL penalty in the reward (Ouyang et al. 2022)."""

    name: Literal["ppo"] = "ppo"
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(0.95, ge=0, le=1)
    value_clip: float | None = Field(0.2, gt=0, description="None: values are not clipped")
    whiten: Literal["batch", "mini_batch", "none"] = "batch"


class AcShareSpec(PpoSpec):
    """PPO with actor and critic on one trunk (Schulman et al. 2017, eq. 9): one optimizer, one loss of both."""

    name: Literal["ac-share"] = "ac-share"  # type: ignore[assignment]
    value_coefficient: float = Field(0.5, ge=0, description="of the value loss beside the policy's")
    freeze_actor_steps: Literal[0] = 0


class DynamicSamplingSpec(StrictModel):
    """Draw ``rounds`` times as many groups as a step is to train on, and leave out those whose answers all score alike
    (DAPO, Yu et al. 2025, section 3.2). The number of rounds is fixed, so that a plan knows it: a mini-batch with more
    groups than its share trains on the first of them, one with fewer on fewer."""

    rounds: int = Field(2, ge=2)


class GroupSpec(PolicySpec):
    """What algorithms have that compare the answers of one prompt, without a critic."""

    samples_per_prompt: int = Field(8, ge=1)
    baseline: Literal["mean", "others"] = Field("mean", description="of the group: of all its answers, or the others")
    scale: Literal["group", "none"] = Field("group", description="group: divide by the group's standard deviation")
    dynamic_sampling: DynamicSamplingSpec | None = None

    @property
    def num_prompts(self) -> int:
        rounds = 1 if self.dynamic_sampling is None else self.dynamic_sampling.rounds
        return rounds * super().num_prompts

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        if self.samples_per_prompt == 1:
            raise ValueError("samples_per_prompt 1: an answer alone has no others to be compared with; use at least 2")
        return self

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return _without_values(self)


Policy = TypeVar("Policy", bound=PolicySpec)


def _without_values(spec: Policy) -> Policy:
    """Refuse what takes a critic."""
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
    """REINFORCE with the others' mean as baseline (Ahmadian et al. 2024, eq. 9): a whole answer is one action."""

    DEFINING = frozenset({"loss_aggregation"})

    name: Literal["rloo"] = "rloo"
    samples_per_prompt: int = Field(4, ge=1)
    baseline: Literal["mean", "others"] = "others"
    scale: Literal["group", "none"] = "none"
    loss_aggregation: LossAggregation = "seq-mean-token-sum"


class GspoSpec(GroupSpec):
    """Group sequence policy optimization (Zheng et al. 2025): the ratio of whole answers, clipped narrowly."""

    DEFINING = frozenset({"clip_low", "clip_high", "loss_aggregation"})

    name: Literal["gspo"] = "gspo"
    kl: KlSpec | None = None
    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    clip_high: float = Field(4e-4, gt=0)
    loss_aggregation: LossAggregation = "seq-mean-token-mean"


class RaftSpec(PolicySpec):
    """Reward-ranked fine-tuning (Dong et al. 2023): the answer of a group that scores best has advantage 1, the others
    are left out."""

    name: Literal["raft"] = "raft"
    samples_per_prompt: int = Field(8, ge=2)
    kl: KlSpec | None = None

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return _without_values(self)


class ReturnsSpec(PolicySpec):
    """What algorithms have whose advantages are the rewards that follow a token, less a baseline."""

    gamma: float = Field(1.0, gt=0, le=1)
    whiten: Literal["batch", "none"] = "batch"

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return _without_values(self)


class ReinforceSpec(ReturnsSpec):
    """REINFORCE++ (Hu 2025): PPO's clip and penalty per token, no critic, advantages whitened over the whole batch."""

    name: Literal["reinforce++"] = "reinforce++"
    kl: KlSpec | None = KlSpec(coefficient=0.01)
    baseline: Literal["none", "group"] = Field("none", description="group: the mean score of the prompt's answers")

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        if self.baseline == "group" and self.samples_per_prompt == 1:
            raise ValueError("baseline: group needs several answers to a prompt; use samples_per_prompt 2 or more")
        return self


class RemaxSpec(ReturnsSpec):
    """ReMax (Li et al. 2023): the score of the greedy answer to the same prompt is the baseline."""

    name: Literal["remax"] = "remax"
    samples_per_prompt: Literal[1] = 1
    normalise_scores: Literal["none", "running"] = "none"
    whiten: Literal["batch", "none"] = "none"


class LagrangeSpec(StrictModel):
    """The multiplier lambda of the bound on the cost, by gradient ascent on its logarithm (Dai et al. 2024, eq. 12):
    log lambda += learning_rate * lambda * (mean cost of a step's answers - limit)."""

    limit: float = Field(0.0, description="the mean cost is to stay below it")
    initial: float = Field(1.0, gt=0)
    learning_rate: float = Field(0.1, ge=0)
    maximum: float = Field(5.0, gt=0)

    @model_validator(mode="after")
    def _starts_within(self) -> Self:
        if self.initial > self.maximum:
            raise ValueError(f"initial {self.initial:g} exceeds maximum {self.maximum:g}")
        return self


class SafeRlhfSpec(PpoSpec):
    """Safe RLHF (Dai et al. 2024): PPO for the reward while the mean cost stays under a limit, with a critic for each.

    The rules for scores (truncation, clip, ...) are for the reward; costs are taken as they are.
    """

    name: Literal["safe-rlhf"] = "safe-rlhf"  # type: ignore[assignment]
    lagrange: LagrangeSpec = LagrangeSpec()


class SftSpec(AlgorithmSpec):
    """Supervised fine-tuning: the negative log-likelihood of the answers."""

    name: Literal["sft"] = "sft"
    samples_per_prompt: Literal[1] = 1
    loss_aggregation: LossAggregation = "token-mean"


class RewardSpec(AlgorithmSpec):
    """Reward model on preference pairs (Ouyang et al. 2022, eq. 1). A pair is one prompt with two samples."""

    name: Literal["reward"] = "reward"
    samples_per_prompt: Literal[2] = 2


class DpoSpec(AlgorithmSpec):
    """Direct preference optimization (Rafailov et al. 2023, eq. 7) on pairs. A pair is one prompt with two samples.

    ``label_smoothing``: the share of pairs that are labelled the wrong way round (cDPO, Mitchell 2023). ``loss: ipo``:
    squared distance of the log-ratios' difference to 1 / (2 beta) (Azar et al. 2024, eq. 17).
    """

    name: Literal["dpo"] = "dpo"
    samples_per_prompt: Literal[2] = 2
    beta: float = Field(0.1, gt=0)
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)

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
