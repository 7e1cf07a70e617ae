"""PPO with separate actor and critic (AC-NonShare)."""

from __future__ import annotations

from flexrlhf.config.algorithms import PpoSpec
from flexrlhf.operators.columns import TEXT
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.operators.policy import advantages, policy_graph, reference, sampled_and_scored, train_actor, train_critic


def ppo(spec: PpoSpec) -> Graph:
    """Return the graph of PPO: generate, four forwards, GAE, and a training of actor and of critic."""
    values = Operator("values", "forward", "critic", TEXT, ("values",))
    estimated = advantages(spec, "ppo_advantages", ("values",), ("returns",), barrier=spec.whiten == "batch")
    operators = (*sampled_and_scored(spec), values, estimated, train_actor(spec), train_critic(spec))
    return policy_graph(spec, operators, ("actor", "critic", *reference(spec), "reward"))
