"""Sections of the settings of policy-gradient algorithms: penalties, and terms of the policy's loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from flexrlhf.config.data_settings import FILES, TextForm
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.config.user_paths import UserPath
from flexrlhf.errors import shown


class TruncationPenalty(StrictModel):
    """Rule that lowers the score of truncated responses."""

    penalty: float = Field(description="subtracted from the score of a truncated response")


TruncationWord = Literal["none", "bootstrap", "mask", "mask-loss"]


def _truncation(value: Any) -> Any:
    """Refuse a value of no form; the message of a union would name one form only."""
    words = get_args(TruncationWord)
    if isinstance(value, dict | TruncationPenalty) or value in words:
        return value
    forms = ", ".join(map(repr, words))
    raise ValueError(f"expected {forms} or a mapping such as {{penalty: 1.0}}, found {shown(value)}")


Truncation = Annotated[TruncationWord | TruncationPenalty, BeforeValidator(_truncation)]
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
    estimator: Literal["k1", "k2", "k3"] = Field("k1", description="with place loss k3 by default")
    clamp: float | None = Field(None, gt=0, description="r is clamped to [-clamp, clamp]; null: it is not")
    value_clamp: float | None = Field(
        None,
        gt=0,
        description="the estimate is clamped to [-value_clamp, value_clamp], beyond which it has no gradient; null: it "
        "is not; of k3 10 by default",
    )
    corrected: bool = Field(
        False,
        description="with place loss: the estimate is multiplied by the policy's ratio, with its gradient, since the "
        "samples are of the policy that the step starts from (DeepSeek-V3.2, section 3.1)",
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
        if self.corrected and self.place != "loss":
            raise ValueError(
                f"corrected: true goes with a penalty in the loss, not with place: {self.place}; use false"
            )
        return self

    def completing(self, written: dict[str, Any]) -> dict[str, Any]:
        """Return ``written`` with the rest from this penalty; another place does not inherit its estimator."""
        moved = written.get("place", self.place) != self.place
        left_out = {"value_clamp", *(["estimator"] if moved else [])}
        return {**{key: value for key, value in self if key not in left_out}, **written}


class OverlongSpec(StrictModel):
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13).

    The score falls by up to ``penalty`` over the last ``buffer_tokens`` of the largest response length.
    """

    buffer_tokens: int | None = Field(None, ge=1, description="null: a fifth of data.max_response_tokens, as there")
    penalty: float = Field(1.0, gt=0, description="subtracted from the score at the largest length")


class PtxSpec(StrictModel):
    """Pretraining loss in addition to the policy's (Ouyang et al. 2022, section 3.5).

    In every optimizer step of the actor, ``coefficient`` times the negative log-likelihood of as many texts as its
    share of ``prompts_per_step`` has responses, at temperature 1, also where dynamic sampling or segments make it train
    on more or fewer. Texts are truncated to the lengths of ``data``, as responses are.
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
