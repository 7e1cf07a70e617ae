"""RAFT: only the best response of each group is trained on."""

from __future__ import annotations

from flexrlhf.config.algorithms import RaftSpec
from flexrlhf.operators.graph import Graph
from flexrlhf.operators.policy import advantages, policy_graph, reference, sampled_and_scored, train_actor


def raft(spec: RaftSpec) -> Graph:
    """Return the graph of reward-ranked fine-tuning (Dong et al. 2023)."""
    operators = (*sampled_and_scored(spec), advantages(spec, "best_of_group"), train_actor(spec))
    return policy_graph(spec, operators, ("actor", *reference(spec), "reward"))
