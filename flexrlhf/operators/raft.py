"""RAFT: the best answer of each group, and no other, is made likelier."""

from __future__ import annotations

from flexrlhf.config.algorithms import RaftSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, drawn, policy_graph, reference, train_actor


def raft(spec: RaftSpec) -> Graph:
    operators = (*drawn(spec), advantages(spec, "best_of_group"), train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
