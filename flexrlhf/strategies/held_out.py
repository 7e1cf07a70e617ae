"""What a rank does in an evaluation: its list is walked once for each batch of held-out prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flexrlhf.strategies.evaluation_batches import HeldOutShape
from flexrlhf.strategies.instructions import Eval, Move, Run


def walk_held_out(instruction: Eval, shape: HeldOutShape, rank: int) -> Iterator[tuple[int, Run | Move, range]]:
    """(place in the list, instruction, batches that it works on), in order. Statistics come last, over all batches."""
    mine = [(index, inner) for index, inner in enumerate(instruction.instructions) if rank in inner.ranks]
    for batch in shape.mini_batches:
        for index, inner in mine:
            each = _of_batch(inner, shape, batch)
            if each is not None:
                yield index, each, range(batch, batch + 1)
    for index, inner in mine:
        if isinstance(inner, Run) and inner.is_statistic:
            yield index, inner, shape.mini_batches


def _of_batch(inner: Run | Move, shape: HeldOutShape, batch: int) -> Run | Move | None:
    """``inner`` for one batch; None where it has nothing to do there."""
    if isinstance(inner, Run):
        return None if inner.is_statistic else inner
    transfers = shape.cut(inner.transfers, batch)
    if not transfers:
        return None
    # an all_gather needs equal shares, which prompts at some of the places are not
    is_full = len(shape.prompts(batch)) == shape.places
    primitive = "all_to_all" if inner.primitive == "all_gather" and not is_full else inner.primitive
    return replace(inner, transfers=transfers, primitive=primitive)
