"""Syncs of copies: after their role has trained, or right before the calls that the copy exists for.

A copy that exists for the length of its calls (parameter reallocation: of placed operators, or of a hybrid engine) is
filled right before its first call in a step, with the weights that the step starts from, and freed right after its last
one; so it is around an evaluation that it computes, with the weights that the step ends with. Nothing of it is kept,
neither on the device nor in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexrlhf.config.spec import Spec
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Release, Run, Sync
from flexrlhf.strategies.schedule import checkpoints


def with_syncs(
    instructions: list[Instruction], placement: Placement, spec: Spec, lag: int, end: list[Instruction]
) -> list[Instruction]:
    """Return ``instructions`` with a Sync after the last train of every role that another copy follows.

    With a lag it comes at the end: the inference side reaches its syncs only after its whole batch, so an earlier one
    would block the models that train after it, unless it overlaps them. For a rollout engine on the ranks of the
    trained copy, which sleeps until then, it comes after ``end``.
    """
    out, last, overlaps = list(instructions), list[Instruction](), spec.syncs_overlap
    for follower in placement.followers:
        source = placement[follower.role]
        ranks = tuple(sorted({*source.ranks, *follower.ranks}))
        sync = Sync(
            ranks=ranks,
            lag=lag,
            every=spec.sync.every,
            source=source.name,
            destination=follower.name,
            is_in_place=follower.is_filled_in_place(source),
            gathers=follower.adapter_gathers(source),
            overlaps=overlaps and follower in placement.shadows and set(source.ranks).isdisjoint(follower.ranks),
        )
        trains = [
            i for i, x in enumerate(out) if isinstance(x, Run) and x.operator.kind == "train" and x.model == source.name
        ]
        if follower not in placement.shadows:
            last.append(sync)
        else:
            out.insert(len(out) if lag and not sync.overlaps else trains[-1] + 1, sync)
    return out + end + last + checkpoints(placement, spec, lag)


def with_refills(instructions: Sequence[Instruction], placement: Placement) -> list[Instruction]:
    """Return ``instructions`` of a step, with those that fill and free the copies of operators."""
    out = list(instructions)
    for copy in placement.models:
        if copy.is_filled_for_calls:
            # from the end, so that positions before it stay
            for start, stop in reversed(list(_uses(out, copy))):
                before, after = _around(out[stop - 1], placement[copy.role], copy)
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


def _around(last: Instruction, source: PlacedModel, copy: PlacedModel) -> tuple[Sync, list[Release]]:
    """Return the Sync before the first instruction that uses ``copy``, and the Release after ``last``, which does."""
    turns = last.turns if isinstance(last, Eval) else {"lag": last.lag}
    sync = Sync(
        ranks=tuple(sorted({*source.ranks, *copy.ranks})),
        **turns,
        source=source.name,
        destination=copy.name,
        is_in_place=copy.is_filled_in_place(source),
        gathers=copy.adapter_gathers(source),
        refills=copy.is_transient,
        after_training=isinstance(last, Eval) and not last.at_start,
    )
    release = Release(ranks=copy.ranks, **turns, model=copy.name)
    return sync, [release] if copy.is_transient else []
