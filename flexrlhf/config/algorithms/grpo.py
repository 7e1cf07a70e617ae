"""Algorithms without a critic that compare the responses to one prompt: GRPO, RLOO, GSPO, RAFT."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.algorithms.base import LossAggregation
from flexrlhf.config.algorithms.policy import (
    PolicySpec,
    advantages,
    policy_graph,
    reference,
    sampled_and_scored,
    train_actor,
)
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.config.strict_model import StrictModel
from flexrlhf.operators.columns import Column
from flexrlhf.operators.graph import Graph


class DynamicSamplingSpec(StrictModel):
    """Dynamic sampling (DAPO, Yu et al. 2025, section 3.2).

    Groups whose responses all have the same score are left out. A mini-batch with fewer others than its share of
    ``prompts_per_step`` samples this share again, of the next prompts of the data, up to ``rounds`` times in total. One
    with more groups trains on the first of them, one that still has fewer on fewer.

    With ``rollout.segment_tokens`` scores come in later steps: for each group that is left out a step takes one prompt
    more, up to ``rounds`` shares in total.
    """

    rounds: int = Field(2, ge=2, description="most times its share of prompts that a mini-batch samples in a step")


class GroupSpec(PolicySpec):
    """Settings of algorithms that compare the responses to one prompt, its group, without a critic."""

    COMPARES_GROUPS = True

    samples_per_prompt: int = Field(8, ge=1)
    baseline: Literal["mean", "others"] = Field(
        "mean", description="mean score of the group, or of its other responses"
    )
    scale: Literal["group", "none"] = Field("group", description="group: divide by the group's standard deviation")
    supervision: Literal["outcome", "process"] = Field(
        "outcome",
        description="outcome: one advantage a response; process: scores of steps are compared, and a token's advantage "
        "is the sum of those that end at or behind it (Shao et al. 2024, section 4.1.3)",
    )
    dynamic_sampling: DynamicSamplingSpec | None = Field(None, description="null: all groups are trained on")

    @property
    def num_prompts(self) -> int:
        return self.attempts * super().num_prompts

    @property
    def attempts(self) -> int:
        return 1 if self.dynamic_sampling is None else self.dynamic_sampling.rounds

    @property
    def reports_kl(self) -> bool:
        return super().reports_kl and self.dynamic_sampling is None

    @property
    def group_columns(self) -> tuple[str, ...]:
        return (Column.GROUP_SCORES, *([Column.GROUP_STEPS] if self.supervision == "process" else []))

    @property
    def why_whole_groups(self) -> str:
        return "" if self.dynamic_sampling is None else "dynamic_sampling leaves out whole groups"

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        if self.samples_per_prompt == 1:
            raise ValueError(
                "samples_per_prompt 1: a single response has no others to be compared with; use at least 2"
            )
        return self

    @property
    def counts_truncated(self) -> bool:
        """Whether truncated responses are counted in a mean over responses, of which their tokens are no part."""
        return self.truncation == "mask-loss" and self.loss_aggregation.startswith("seq-")

    @model_validator(mode="after")
    def _steps_compare(self) -> Self:
        if self.supervision == "process":
            if self.baseline == "others":
                raise ValueError("supervision: process compares steps with the group's mean; use baseline: mean")
            if self.kl is not None and self.kl.place != "loss":
                raise ValueError("supervision: process has scores of steps alone; use kl.place: loss, or kl: null")
            if self.normalise_scores != "none":
                raise ValueError("supervision: process normalises scores of steps itself; use normalise_scores: none")
        return self

    def step_graph(self) -> Graph:
        ends = (Column.STEP_ENDS,) if self.supervision == "process" else ()
        operators = (*sampled_and_scored(self), advantages(self, "group_advantages", ends), train_actor(self))
        return policy_graph(self, operators, ("actor", *reference(self), "reward"))


class GrpoSpec(GroupSpec):
    """Group relative policy optimization (DeepSeekMath, Shao et al. 2024, section 4.1), outcome or process supervision.

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
    ratio: Literal["token", "sequence", "sequence-token"] = "sequence"
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

    @property
    def reports_kl(self) -> bool:
        return False

    @property
    def why_whole_groups(self) -> str:
        return f"{self.name} trains on the best of all responses to a prompt"

    def step_graph(self) -> Graph:
        operators = (*sampled_and_scored(self), advantages(self, "best_of_group"), train_actor(self))
        return policy_graph(self, operators, ("actor", *reference(self), "reward"))
