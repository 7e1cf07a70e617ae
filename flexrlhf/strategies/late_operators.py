"""Operators that run on the ranks of training, so with a lag as many batches behind the newest as training is.

There they are where these ranks would else wait: for a batch that is generated long ago, before they train on it.
"""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.placed import Placement


def training_ranks(graph: Graph, placement: Placement) -> frozenset[int]:
    """Return the ranks that train a model."""
    return frozenset(rank for role in graph.trained for rank in placement[role].ranks)


def is_late(operator: Operator, graph: Graph, placement: Placement) -> bool:
    """Whether ``operator`` runs on ranks of training."""
    return not training_ranks(graph, placement).isdisjoint(placement.copy_for(operator).ranks)


def behind_training(graph: Graph, placement: Placement) -> Graph:
    """Return ``graph`` with each combine on the trained copy if it needs columns that are written on ranks of training.

    Such columns are of the batch that is trained on next, not of the newest.
    """
    late: set[str] = set()
    operators = []
    for operator in graph.operators:
        if operator.kind == "combine" and late.intersection(operator.reads):
            operator = replace(operator, on_trained=True)
        if is_late(operator, graph, placement):
            late.update(operator.writes)
        operators.append(operator)
    return replace(graph, operators=tuple(operators))
