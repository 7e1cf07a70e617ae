"""Table of the instructions of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexrlhf.operators.graph import Operator
from flexrlhf.placement.layout import BatchShape
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Checkpoint, Eval, Instruction, Move, Offload, Reload, Run, Save, Sync
from flexrlhf.text import bytes_text, rank_marks


@dataclass(frozen=True)
class ScheduleRow:
    """A line of the table of instructions.

    ranks:     that it names
    kind:      of the instruction
    label:     of the instruction
    notes:     primitive, bytes, period, chunk and lag, where it has them
    is_inner:  whether it belongs to the evaluation above it
    """

    ranks: tuple[int, ...]
    kind: str
    label: str
    notes: tuple[str, ...]
    is_inner: bool


def schedule_rows(plan: Plan) -> list[ScheduleRow]:
    """Return a row for each instruction; those of an evaluation, for one batch of its rows, follow it."""
    rows = []
    for each in plan.schedule.instructions:
        rows.append(_row(plan, each, plan.batch, is_inner=False))
        if isinstance(each, Eval):
            rows += [_row(plan, inner, each.batch, is_inner=True) for inner in each.instructions]
    return rows


def _row(plan: Plan, each: Instruction, batch: BatchShape, is_inner: bool) -> ScheduleRow:
    label = f"{', '.join(each.columns)}  {each.edge}" if isinstance(each, Move) else each.label
    return ScheduleRow(each.ranks, each.kind, label, tuple(_notes(plan, each, batch)), is_inner)


def schedule_table(plan: Plan) -> list[str]:
    """Return a line for each of ``schedule_rows``: ranks, kind, label, and for moves and syncs primitive and bytes."""
    rows = schedule_rows(plan)
    width = max(len(row.label) for row in rows)
    return [
        f"{rank_marks(row.ranks, plan.placement.num_ranks)}  {'  ' * row.is_inner}{row.kind:<5} "
        f"{row.label:<{min(width, 60) - 2 * row.is_inner}}  {'  '.join(row.notes)}".rstrip()
        for row in rows
    ]


def _notes(plan: Plan, instruction: Instruction, batch: BatchShape) -> list[str]:
    """Return primitive, bytes, period, chunk and lag, if the instruction has them."""
    notes: list[str] = []
    match instruction:
        case Move():
            notes = [instruction.primitive, bytes_text(plan.traffic.move_bytes(instruction, batch))]
        case Sync():
            way = "in place" if instruction.is_in_place else "point_to_point"
            notes = [way, bytes_text(plan.traffic.sync_bytes(instruction)), _period(instruction)]
            notes += ["in the background"] * instruction.overlaps
        case Offload(is_unchanged=True):
            notes = ["unchanged: not copied"]
        case Reload(overlaps=True):
            notes = ["in the background"]
        case Run() if instruction.operator.every > 1:
            notes = [_turns(instruction.operator, plan.spec.steps)]
        case Eval() | Save() | Checkpoint():
            notes = [_period(instruction, plan.spec.steps)]
    chunk = instruction.chunk
    if chunk is not None:
        notes.append(f"attempt {chunk}" if plan.batch.attempts > 1 else f"chunk {chunk}")
    if instruction.lag:
        notes.append("of the last batch" if instruction.lag == 1 else f"of the batch {instruction.lag} before")
    return notes


def _turns(operator: Operator, steps: int) -> str:
    """Return the steps in which an operator with a period runs."""
    first = [str(step) for step in dict.fromkeys((0, operator.also)) if step < steps]
    shown = f"at step {' and '.join(first)}"
    return shown if operator.every >= steps else f"{shown}, every {operator.every} steps"


def _period(instruction: Sync | Eval | Save | Checkpoint, steps: float = math.inf) -> str:
    """Return when an instruction is due in a run of ``steps`` steps."""
    if instruction.at_start:
        return "before the first step"
    if instruction.every >= steps:
        return "after the last step"
    return "every step" if instruction.every == 1 else f"every {instruction.every} steps"
