"""Settings of algorithms that generate: how responses are sampled, and the correction for another policy's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.strict_model import StrictModel


def _as_list(value: Any) -> Any:
    """Make a list of one text."""
    return (value,) if isinstance(value, str) else value


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
