"""A rank's instructions as work that takes memory, each with the models that lie in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexrlhf.operators.graph import Operator
from flexrlhf.placement.copies import WeightSync
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.memory import Compute, Saving, Work
from flexrlhf.placement.placed import Placement
from flexrlhf.strategies.instructions import Eval, Instruction, Offload, Reload, Run, Save, Sync


def workload(
    instructions: Sequence[Instruction],
    placement: Placement,
    batch: BatchShape,
    evaluation: Sequence[Operator],
    rank: int,
) -> Iterator[tuple[Work, frozenset[str]]]:
    """``instructions``: those of one step that name ``rank``. A model that is first reloaded starts in host memory."""
    away = _away_at_start(instructions)
    for instruction in instructions:
        match instruction:
            case Offload():
                away |= {instruction.model}
            case Reload():
                away -= {instruction.model}
        for work in works_of(instruction, placement, batch, evaluation, rank):
            yield work, away


def works_of(
    instruction: Instruction, placement: Placement, batch: BatchShape, evaluation: Sequence[Operator], rank: int
) -> tuple[Work, ...]:
    """What ``rank`` does at ``instruction``; nothing at those that take next to no memory."""
    match instruction:
        case Run():
            return _compute(instruction.operator, instruction.model, _largest_call(instruction, placement, batch, rank))
        case Eval():
            # how many held-out rows there are, only the data tells
            return tuple(work for operator in evaluation for work in _compute(operator, instruction.model, None))
        case Sync():
            return (WeightSync(instruction.source, instruction.destination, instruction.transfers),)
        case Save():
            return (Saving(instruction.model, instruction.ranks),)
    return ()


def _compute(operator: Operator, model: str, rows: int | None) -> tuple[Work, ...]:
    return () if operator.kind == "combine" else (Compute(operator.kind, model, rows),)


def _largest_call(run: Run, placement: Placement, batch: BatchShape, rank: int) -> int:
    """Rows of the largest call: training takes a mini-batch at a time, all else all of them."""
    layout = placement[run.model].layout
    single = [range(index, index + 1) for index in run.mini_batches]
    calls = single if run.operator.kind == "train" else [run.mini_batches]
    return batch.samples_per_prompt * max(len(batch.held(layout, rank, call)) for call in calls)


def _away_at_start(instructions: Sequence[Instruction]) -> frozenset[str]:
    first: dict[str, Instruction] = {}
    for instruction in instructions:
        if isinstance(instruction, Offload | Reload):
            first.setdefault(instruction.model, instruction)
    return frozenset(name for name, instruction in first.items() if isinstance(instruction, Reload))
