"""REINFORCE++: no critic; the group's mean may be the baseline."""

from __future__ import annotations

from flexrlhf.config.algorithms import ReinforceSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, policy_graph, reference, sampled_and_scored, train_actor


def reinforce(spec: ReinforceSpec) -> Graph:
    """Return the graph of REINFORCE++ (Hu 2025), with or without a baseline."""
    whitened = advantages(spec, "reinforce_advantages", barrier=spec.whiten == "batch")
    operators = (*sampled_and_scored(spec), whitened, train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
