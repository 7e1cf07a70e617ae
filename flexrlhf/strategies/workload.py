"""Work of a rank that needs memory, with the models that are offloaded during each piece of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexrlhf.memory.budget import Compute, Copying, Releasing, Saving, Work
from flexrlhf.memory.transfer_bytes import WeightSync
from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import ModelName
from flexrlhf.placement.placement import Placement
from flexrlhf.strategies.instructions import (
    Checkpoint,
    Eval,
    Instruction,
    Offload,
    Release,
    Reload,
    Run,
    Save,
    Sync,
)


def workload(
    instructions: Sequence[Instruction],
    placement: Placement,
    batch: BatchShape,
    rank: int,
) -> Iterator[tuple[Work, frozenset[ModelName]]]:
    """Yield the work of ``instructions``, those of one step that name ``rank``, and the models that are offloaded or
    released during it.

    A model that is first reloaded starts in host memory, one that is refilled has no memory before.
    """
    absent, woken = _absent_at_start(instructions), frozenset[ModelName]()
    for instruction in instructions:
        match instruction:
            case Offload():
                absent |= {instruction.model}
            case Reload():
                absent -= {instruction.model}
                woken |= {instruction.model}
            case Run() | Eval():
                woken -= frozenset(instruction.uses)
            case Sync(refills=True):
                absent -= {instruction.destination}
                woken |= {instruction.destination}
        for work in works_of(instruction, batch, rank):
            if isinstance(work, WeightSync) and work.destination in woken:
                yield replace(work, wakes=placement[work.destination].has_cache), absent
            else:
                yield work, absent
        if isinstance(instruction, Release):
            absent |= {instruction.model}


def works_of(instruction: Instruction, batch: BatchShape, rank: int) -> tuple[Work, ...]:
    """Return the work of ``rank`` at ``instruction``; none at instructions that need next to no memory."""
    match instruction:
        case Run():
            return _compute(instruction, batch, _largest_call(instruction, batch, rank))
        case Eval(batch=evaluation):
            runs = [run for run in instruction.runs if rank in run.ranks]
            return tuple(work for run in runs for work in works_of(run, evaluation, rank))
        case Sync():
            return (WeightSync(instruction.source, instruction.destination, instruction.overlaps),)
        case Save():
            return (Saving(instruction.model, instruction.ranks),)
        case Checkpoint():
            return (Copying(instruction.models),)
        case Release():
            return (Releasing(instruction.model),)
    return ()


def _compute(run: Run, batch: BatchShape, rows: int) -> tuple[Work, ...]:
    operator, call, texts = run.operator, run.operator.call, 2 if run.operator.extra_loss else 1
    if call is None:
        return ()
    compares, block, samples = operator.compares_responses, batch.block_rows, batch.samples_per_prompt
    carries = call == "generate" and bool(operator.carries)
    return (Compute(call, run.model, rows, samples, texts, compares, block, run.tokens, carries),)


def _largest_call(run: Run, batch: BatchShape, rank: int) -> int:
    """Return the rows of the largest call: training takes a mini-batch at a time, all else all of them."""
    single = [range(index, index + 1) for index in run.mini_batches]
    calls = single if run.operator.call == "train" else [run.mini_batches]
    return batch.samples_per_prompt * max(batch.num_prompts_on(run.layout, rank, call, run.attempt) for call in calls)


def _absent_at_start(instructions: Sequence[Instruction]) -> frozenset[ModelName]:
    first: dict[ModelName, Instruction] = {}
    for instruction in instructions:
        if isinstance(instruction, Offload | Reload):
            first.setdefault(instruction.model, instruction)
        elif isinstance(instruction, Sync) and instruction.refills:
            first.setdefault(instruction.destination, instruction)
    return frozenset(name for name, instruction in first.items() if isinstance(instruction, Reload | Sync))
