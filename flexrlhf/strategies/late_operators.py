"""Operators that run on the ranks of training or with its weights, so with a lag as many batches behind the newest as
training is.

There they are where these ranks would else wait, for rows that have been generated long ago. Generation then waits for
nothing but weights: combines, which need the results of all other models, are not on its ranks.
"""

from __future__ import annotations

from dataclasses import replace

from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.placed import Placement


def training_ranks(graph: Graph, placement: Placement) -> frozenset[int]:
    """Return the ranks that train a model."""
    return frozenset(rank for role in graph.trained for rank in placement[role].ranks)


def is_late(operator: Operator, graph: Graph, placement: Placement) -> bool:
    """Whether ``operator`` runs on ranks of training, or with the weights that training of its batch starts from."""
    copy = placement.copy_for(operator)
    is_filled = copy.role in graph.trained and copy.is_filled_for_calls
    return operator.on_trained or is_filled or not training_ranks(graph, placement).isdisjoint(copy.ranks)


def behind_training(graph: Graph, placement: Placement) -> Graph:
    """Return ``graph`` with its combines on trained copies, but for those whose columns a model or a source of scores
    on other ranks reads. Raises UserError where such a reader needs columns of the ranks of training.
    """
    operators: list[Operator] = []
    needed: set[str] = set()
    for operator in reversed(graph.operators):
        is_needed = not needed.isdisjoint(operator.writes)
        if operator.kind == "combine" and operator.role in graph.trained and not is_needed:
            operator = replace(operator, on_trained=True)
        if not is_late(operator, graph, placement):
            needed.update(operator.reads)
        operators.insert(0, operator)
    behind = replace(graph, operators=tuple(operators))
    _check_readers(behind, placement)
    return behind


def _check_readers(graph: Graph, placement: Placement) -> None:
    for operator in graph.operators:
        if is_late(operator, graph, placement):
            continue
        for parent in graph.operators:
            is_read = not set(parent.writes).isdisjoint((*operator.reads, *operator.earlier, *operator.carries))
            if is_read and is_late(parent, graph, placement):
                raise UserError(
                    f"schedule.lag: {operator.name} is computed for the newest batch and reads columns of "
                    f"{parent.name}, computed on {placement.copy_for(parent).name} when it is trained on; place that "
                    f"on ranks that do not train, or use lag 0"
                )
