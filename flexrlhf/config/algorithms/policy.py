"""Algorithms that train on sampled responses with a clipped policy gradient: their settings, and those with a critic
or with returns alone."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

from pydantic import BeforeValidator, Field, model_validator

from flexrlhf.config.algorithms.base import LossAggregation
from flexrlhf.config.algorithms.sampled import SampledSpec
from flexrlhf.config.rows import FILES, TextForm
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.user_paths import UserPath
from flexrlhf.errors import shown


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


Truncation = Annotated[TruncationWord | TruncationPenalty, BeforeValidator(_truncation)]


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

    path: UserPath = Field(description=FILES)
    form: TextForm = Field("auto", description="columns of a row; auto: follows from the first row")
    columns: dict[str, str] = Field(default_factory=dict, description="name that the form uses: column of the rows")
    coefficient: float = Field(1.0, gt=0, description="factor of this loss")


class CovarianceSpec(StrictModel):
    """Tokens of high covariance of log-prob and advantage, which lower the entropy most (Cui et al. 2025, section 4.2).

    Covariance of a token: (log-prob - mean) (advantage - mean), with means over the tokens of the mini-batch and
    log-probs of the policy that the step starts from. Of a mini-batch are selected, at least one token each:
    clip-cov: ``share`` of its tokens, by a hash, among those with a covariance between ``lower`` and ``upper``; they
    have no gradient. kl-cov: the ``share`` of its tokens with the highest covariance; their loss has
    ``coefficient`` abs(log ratio) added.
    """

    share: float = Field(0.0002, gt=0, le=1, description="share of the tokens that is selected")
    lower: float = Field(1.0, description="clip-cov: smallest covariance that may be selected")
    upper: float = Field(5.0, description="clip-cov: largest covariance that may be selected")
    coefficient: float = Field(1.0, ge=0, description="kl-cov: factor of the penalty")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.lower >= self.upper:
            raise ValueError(f"lower {self.lower:g} is not below upper {self.upper:g}")
        return self


class PolicySpec(SampledSpec):
    """Settings of algorithms that train on sampled responses with a clipped policy gradient."""

    kl: KlSpec | None = Field(KlSpec(), description="null: no penalty, and no reference model is placed")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped to at least 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped to at most 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="largest ratio where the advantage is negative; null: no limit"
    )
    surrogate: Literal["clip", "cispo", "clip-cov", "kl-cov"] = Field(
        "clip",
        description="clip: PPO's; cispo: clipped weights of log-probs; clip-cov: clip, without the loss of some tokens "
        "of high covariance; kl-cov: no clip, a penalty on the tokens of highest covariance",
    )
    ratio: Literal["token", "sequence", "sequence-token"] = Field(
        "token",
        description="sequence: one ratio of the whole response (GSPO); sequence-token: its value, with the gradient of "
        "each token's own (GSPO-token)",
    )
    covariance: CovarianceSpec = Field(CovarianceSpec(), description="of surrogate: clip-cov and kl-cov")
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

    COMPARES_GROUPS: ClassVar[bool] = False
    """Whether the responses to one prompt are compared with each other."""

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
        if self.kl is not None and self.kl.place == "advantages" and not self.COMPARES_GROUPS:
            raise ValueError(
                "kl.place advantages goes with scores that are compared within a group (grpo, rloo, gspo); use reward"
            )
        return self

    @property
    def selects_tokens(self) -> bool:
        """Whether tokens are selected by their covariance."""
        return self.surrogate in ("clip-cov", "kl-cov")

    @model_validator(mode="after")
    def _surrogate_of_tokens(self) -> Self:
        if self.surrogate != "clip":
            if self.ratio != "token":
                raise ValueError(f"surrogate: {self.surrogate} takes ratios of tokens; use ratio: token")
            if self.dual_clip is not None and self.surrogate != "clip-cov":
                raise ValueError(f"dual_clip {self.dual_clip:g} bounds a clipped loss; use null, or surrogate: clip")
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


Policy = TypeVar("Policy", bound=PolicySpec)


def without_values(spec: Policy) -> Policy:
    """Return ``spec``; raise ValueError for a setting that needs a critic."""
    if spec.truncation == "bootstrap":
        raise ValueError("truncation: bootstrap needs the values of a critic; use none, mask or a penalty")
    return spec


class ReturnsSpec(PolicySpec):
    """Settings of algorithms whose advantages are the returns of a token minus a baseline, without a critic."""

    gamma: float = Field(1.0, gt=0, le=1, description="discount of rewards, per token")
    whiten: Literal["batch", "none"] = Field("batch", description="advantages to mean 0, deviation 1 over the step")

    @model_validator(mode="after")
    def _no_values(self) -> Self:
        return without_values(self)


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
