"""Algorithms with a critic: PPO, with two models or one trunk, and Safe RLHF."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexrlhf.config.algorithms.policy import (
    PolicySpec,
    advantages,
    policy_graph,
    reference,
    sampled_and_scored,
    train_actor,
    train_critic,
)
from flexrlhf.config.algorithms.policy_sections import LagrangeSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator


class PpoSpec(PolicySpec):
    """Proximal policy optimization (Schulman et al. 2017), GAE, a KL penalty in the reward (Ouyang et al. 2022)."""

    HAS_CRITIC = True

    name: Literal["ppo"] = "ppo"
    gamma: float = Field(1.0, gt=0, le=1, description="discount of rewards, per token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of generalised advantage estimation")
    value_clip: float | None = Field(
        0.2, gt=0, description="largest change of a value in the value loss; null: values are not clipped"
    )
    whiten: Literal["batch", "mini_batch", "none"] = Field(
        "batch", description="advantages to mean 0, deviation 1 over the step or a mini-batch"
    )

    def step_graph(self) -> Graph:
        values = Operator("values", "forward", "critic", TEXT, ("values",))
        estimated = advantages(self, "ppo_advantages", ("values",), ("returns",), barrier=self.whiten == "batch")
        operators = (*sampled_and_scored(self), values, estimated, train_actor(self), train_critic(self))
        return policy_graph(self, operators, ("actor", "critic", *reference(self), "reward"))


class AcShareSpec(PpoSpec):
    """PPO with actor and critic on one trunk (Schulman et al. 2017, eq. 9): one optimizer, one loss of both."""

    name: Literal["ac-share"] = "ac-share"  # type: ignore[assignment]
    value_coefficient: float = Field(0.5, ge=0, description="factor of the value loss, which is added to the policy's")
    freeze_actor_steps: Literal[0] = 0

    def step_graph(self) -> Graph:
        estimated = advantages(self, "ppo_advantages", ("values",), ("returns",), barrier=self.whiten == "batch")
        train = train_actor(self, "shared_loss", ("values", "returns"), quantities=("logprobs", "values"))
        operators = (*sampled_and_scored(self, forwarded=("logprobs", "values")), estimated, train)
        return policy_graph(self, operators, ("actor", *reference(self), "reward"))


class SafeRlhfSpec(PpoSpec):
    """Safe RLHF (Dai et al. 2024): PPO for the reward while the mean cost stays under a limit, with a critic for each.

    The rules for scores (truncation, clip, ...) are for the reward; costs are taken as they are.
    """

    name: Literal["safe-rlhf"] = "safe-rlhf"  # type: ignore[assignment]
    lagrange: LagrangeSpec = LagrangeSpec()

    @property
    def lagrange_multiplier(self) -> LagrangeSpec | None:
        return self.lagrange

    def step_graph(self) -> Graph:
        costs = Operator("costs", "forward", "cost", TEXT, ("scores.cost",))
        values = Operator("values", "forward", "critic", TEXT, ("values",))
        cost_values = Operator("cost_values", "forward", "cost_critic", TEXT, ("values.cost",))
        read, written = ("values", "scores.cost", "values.cost"), ("returns", "returns.cost")
        estimated = advantages(self, "safe_advantages", read, written, barrier=self.whiten == "batch")
        trains = (train_actor(self), train_critic(self), train_critic(self, "cost_critic", ".cost"))
        operators = (*sampled_and_scored(self), costs, values, cost_values, estimated, *trains)
        return policy_graph(self, operators, ("actor", "critic", "cost_critic", *reference(self), "reward", "cost"))
