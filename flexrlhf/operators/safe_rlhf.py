"""Safe RLHF: PPO with a cost model and a cost critic in addition to those of the reward."""

from __future__ import annotations

from flexrlhf.config.algorithms import SafeRlhfSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.operators.policy import advantages, policy_graph, reference, sampled_and_scored, train_actor, train_critic


def safe_rlhf(spec: SafeRlhfSpec) -> Graph:
    """Return the graph of Safe RLHF (Dai et al. 2023): advantages weigh reward against cost by a multiplier."""
    costs = Operator("costs", "forward", "cost", TEXT, ("scores.cost",))
    values = Operator("values", "forward", "critic", TEXT, ("values",))
    cost_values = Operator("cost_values", "forward", "cost_critic", TEXT, ("values.cost",))
    read, written = ("values", "scores.cost", "values.cost"), ("returns", "returns.cost")
    estimated = advantages(spec, "safe_advantages", read, written, barrier=spec.whiten == "batch")
    trains = (train_actor(spec), train_critic(spec), train_critic(spec, "cost_critic", ".cost"))
    operators = (*sampled_and_scored(spec), costs, values, cost_values, estimated, *trains)
    return policy_graph(spec, operators, ("actor", "critic", "cost_critic", *reference(spec), "reward", "cost"))
