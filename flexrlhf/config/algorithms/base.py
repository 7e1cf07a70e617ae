"""Settings that all algorithms have."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.strict_model import StrictModel


class AlgorithmSpec(StrictModel):
    """Settings of every algorithm: the size of a step and of its mini-batches."""

    prompts_per_step: int = Field(32, ge=1, description="prompts of one training step, over all replicas")
    num_mini_batches: int = Field(1, ge=1, description="optimizer steps per epoch of one step")
    epochs: int = Field(1, ge=1, description="passes over the rows of one step")

    @property
    def num_prompts(self) -> int:
        """Number of prompts whose rows one step trains on."""
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
