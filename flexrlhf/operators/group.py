"""Algorithms without a critic that compare the answers of one prompt: GRPO and its kin."""

from __future__ import annotations

from flexrlhf.config.algorithms import GroupSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, drawn, policy_graph, reference, train_actor


def group(spec: GroupSpec) -> Graph:
    operators = (*drawn(spec), advantages(spec, "group_advantages"), train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
