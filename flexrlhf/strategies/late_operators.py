"""Operators that run on the ranks of training or with its weights, so with a lag as many batches behind the newest as
training is.

There they are where these ranks would else wait, for rows that have been generated long ago. Generation then waits for
nothing but weights: combines, which need the results of all other models, are not on its ranks. In chunks without a lag
the ranks that generate would compute the combines of a chunk only when a later one is generated, and its training would
wait for them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph, Operator
from flexrlhf.placement.placement import Placement


def is_late(operator: Operator, graph: Graph, placement: Placement) -> bool:
    """Whether ``operator`` runs on ranks of training, or with the weights that training of its batch starts from."""
    copy = placement.copy_for(operator)
    is_filled = copy.role in graph.trained and copy.is_filled_for_calls
    trains = any(not set(copy.ranks).isdisjoint(placement[role].ranks) for role in graph.trained)
    return operator.on_trained or is_filled or trains


def combines_behind_training(graph: Graph, placement: Placement, lag: int) -> Graph:
    """Return ``graph`` with its combines on trained copies; without a lag those of single chunks, if models train on
    single chunks.

    Raises UserError where with a lag a model or a source of scores on other ranks needs columns of the ranks of
    training.
    """
    if lag:
        behind = _combines_on_trained(graph, placement)
        _check_readers(behind, placement)
        return behind
    whole = placement.whole_step(graph)
    streams = any(each.kind == "train" and each.name not in whole for each in graph.operators)
    return _combines_on_trained(graph, placement, whole) if streams else graph


def _combines_on_trained(graph: Graph, placement: Placement, others: Collection[str] = ()) -> Graph:
    """Return ``graph`` with its combines on trained copies, but for ``others`` and those whose columns a model or a
    source of scores on other ranks reads."""
    operators: list[Operator] = []
    # what generation and the choice of prompts read of earlier rows is written there
    newest = [
        o for o in graph.operators if (o.kind == "generate" or o.takes_prompts) and not is_late(o, graph, placement)
    ]
    needed = {name for each in newest for name in (*each.earlier, *each.carries)}
    for operator in reversed(graph.operators):
        stays = operator.name in others or not needed.isdisjoint(operator.writes)
        if operator.kind == "combine" and operator.role in graph.trained and not stays:
            operator = replace(operator, on_trained=True)
        if not is_late(operator, graph, placement):
            needed.update(operator.reads)
        operators.insert(0, operator)
    return replace(graph, operators=tuple(operators))


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
