"""Algorithms that train on responses of the data set: SFT, reward models, and preferences."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.algorithms.base import AlgorithmSpec, LossAggregation


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
