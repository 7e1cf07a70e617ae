"""Safe RLHF: PPO with a cost model and a critic of the cost beside those of the reward."""

from __future__ import annotations

from flexrlhf.config.algorithms import SafeRlhfSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.operators.policy import advantages, drawn, policy_graph, reference, train_actor, train_critic


def safe_rlhf(spec: SafeRlhfSpec) -> Graph:
    costs = Operator("costs", "forward", "cost", TEXT, ("scores.cost",))
    values = Operator("values", "forward", "critic", TEXT, ("values",))
    cost_values = Operator("cost_values", "forward", "cost_critic", TEXT, ("values.cost",))
    read, told = ("values", "scores.cost", "values.cost"), ("returns", "returns.cost")
    estimated = advantages(spec, "safe_advantages", read, told, barrier=spec.whiten == "batch")
    trains = (train_actor(spec), train_critic(spec), train_critic(spec, "cost_critic", ".cost"))
    operators = (*drawn(spec), costs, values, cost_values, estimated, *trains)
    return policy_graph(spec, operators, ("actor", "critic", "cost_critic", *reference(spec), "reward", "cost"))
