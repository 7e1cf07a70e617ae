"""Algorithms whose advantages are the returns of a token minus a baseline, without a critic: REINFORCE++, ReMax."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, model_validator

from flexrlhf.config.algorithms.policy import (
    SCORES,
    PolicySpec,
    advantages,
    policy_graph,
    reference,
    sampled_and_scored,
    train_actor,
)
from flexrlhf.config.algorithms.policy_sections import KlSpec
from flexrlhf.operators.columns import TEXT, Column
from flexrlhf.operators.graph import GENERATE, Graph

GREEDY = Column.qualified((*TEXT, "response_mask", "finished"), "greedy")


class ReturnsSpec(PolicySpec):
    """Settings of algorithms whose advantages are the returns of a token minus a baseline, without a critic."""

    gamma: float = Field(1.0, gt=0, le=1, description="discount of rewards, per token")
    whiten: Literal["batch", "none"] = Field("batch", description="advantages to mean 0, deviation 1 over the step")


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

    @property
    def group_columns(self) -> tuple[str, ...]:
        return (Column.GROUP_SCORES,) if self.baseline == "group" else ()

    def step_graph(self) -> Graph:
        whitened = advantages(self, "reinforce_advantages", barrier=self.whiten == "batch")
        operators = (*sampled_and_scored(self), whitened, train_actor(self))
        return policy_graph(self, operators, ("actor", *reference(self), "reward"))


class RemaxSpec(ReturnsSpec):
    """ReMax (Li et al. 2023): the score of the greedy response to the same prompt is the baseline."""

    name: Literal["remax"] = "remax"
    samples_per_prompt: Literal[1] = 1
    normalise_scores: Literal["none", "running"] = "none"
    whiten: Literal["batch", "none"] = "none"

    def step_graph(self) -> Graph:
        """Return a graph with greedy responses as baseline, which either copy of the actor may generate."""
        greedy = replace(GENERATE, name="greedy", writes=GREEDY, suffix=".greedy", is_greedy=True, either_copy=True)
        scores = replace(SCORES, name="greedy_scores", reads=GREEDY[:2], writes=("scores.greedy",), suffix=".greedy")
        compared = advantages(self, "remax_advantages", ("scores.greedy", *GREEDY[2:]), barrier=self.whiten == "batch")
        operators = (*sampled_and_scored(self), greedy, scores, compared, train_actor(self))
        return policy_graph(self, operators, ("actor", *reference(self), "reward"))
