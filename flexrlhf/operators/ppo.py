"""PPO with separate actor and critic (AC-NonShare)."""

from __future__ import annotations

from flexrlhf.config.algorithms import PpoSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.operators.policy import advantages, drawn, policy_graph, reference, train_actor, train_critic


def ppo(spec: PpoSpec) -> Graph:
    values = Operator("values", "forward", "critic", TEXT, ("values",))
    estimated = advantages(spec, "ppo_advantages", ("values",), ("returns",), barrier=spec.whiten == "batch")
    operators = (*drawn(spec), values, estimated, train_actor(spec), train_critic(spec))
    return policy_graph(spec, operators, ("actor", "critic", *reference(spec), "reward"))
