"""REINFORCE++: no critic; with or without the group's mean as baseline."""

from __future__ import annotations

from flexrlhf.config.algorithms import ReinforceSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, drawn, policy_graph, reference, train_actor


def reinforce(spec: ReinforceSpec) -> Graph:
    whitened = advantages(spec, "reinforce_advantages", barrier=spec.whiten == "batch")
    operators = (*drawn(spec), whitened, train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
