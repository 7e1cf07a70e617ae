"""Insert the Sync and the Release of copies that exist for the length of their calls: parameter reallocation.

A copy of placed operators, or of a hybrid engine, is filled right before its first call in a step, with the weights
that the step starts from, and freed right after its last one; so it is around an evaluation that it computes, with the
weights that the step ends with. Nothing of it is kept, neither on the device nor in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexrlhf.placement.placed import PlacedModel, Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Release, Run, Sync
from flexrlhf.weights.sync_plan import adapter_gathers, is_in_place


def with_refills(instructions: Sequence[Instruction], placement: Placement) -> list[Instruction]:
    """Return ``instructions`` of a step without a lag, with those that fill and free the copies of operators."""
    out = list(instructions)
    for copy in placement.models:
        if copy.is_filled_for_calls:
            # from the end, so that positions before it stay
            for start, stop in reversed(list(_uses(out, copy))):
                before, after = _around(out[start], placement[copy.role], copy)
                out[start:stop] = [before, *out[start:stop], *after]
    return out


def _uses(instructions: Sequence[Instruction], copy: PlacedModel) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ``instructions`` in which ``copy`` is used: all runs of a step, then each evaluation."""
    runs = [i for i, each in enumerate(instructions) if isinstance(each, Run) and each.model == copy.name]
    if runs:
        first = runs[0]
        # the source's ranks need not wait for what the copy's ranks have no part in
        while first and not set(instructions[first - 1].ranks) & set(copy.ranks):
            first -= 1
        yield first, runs[-1] + 1
    for index, each in enumerate(instructions):
        if isinstance(each, Eval) and copy.name in each.models:
            yield index, index + 1


def _around(first: Instruction, source: PlacedModel, copy: PlacedModel) -> tuple[Sync, list[Release]]:
    """Return the Sync before ``first``, the first instruction that uses ``copy``, and the Release after the last."""
    every, at_end = (first.every, first.at_end) if isinstance(first, Eval) else (1, False)
    sync = Sync(
        ranks=tuple(sorted({*source.ranks, *copy.ranks})),
        every=every,
        at_end=at_end,
        source=source.name,
        destination=copy.name,
        is_in_place=is_in_place(source, copy),
        gathers=adapter_gathers(source, copy),
        refills=copy.is_transient,
        after_training=isinstance(first, Eval),
    )
    release = Release(ranks=copy.ranks, every=every, at_end=at_end, model=copy.name)
    return sync, [release] if copy.is_transient else []
