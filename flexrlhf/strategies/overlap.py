"""Which operators run at the same time: the schedule played with one unit of time per Run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

from flexrlhf.strategies.instructions import Run, Sync
from flexrlhf.strategies.schedule import Schedule


@dataclass(frozen=True)
class Slot:
    """A Run of one step in the unit-time play."""

    run: Run
    step: int
    start: int


def play(schedule: Schedule, steps: int) -> list[Slot]:
    """Start every Run when its ranks are free and its columns written; moves take no time, a Sync joins its ranks."""
    free: dict[int, int] = defaultdict(int)
    written: dict[tuple[int, str, int], int] = defaultdict(int)
    slots: list[Slot] = []
    for loop in range(steps + schedule.lag):
        for instruction in schedule.instructions:
            step = loop - instruction.lag
            if not instruction.due(step, steps) or not isinstance(instruction, Run | Sync):
                continue
            start = max(free[rank] for rank in instruction.ranks)
            if isinstance(instruction, Run):
                reads = [written[step, c, m] for c in instruction.operator.reads for m in instruction.mini_batches]
                start = max(start, *reads, 0)
                slots.append(Slot(instruction, step, start))
                for column in instruction.operator.writes:
                    written.update({(step, column, m): start + 1 for m in instruction.mini_batches})
            for rank in instruction.ranks:
                free[rank] = start + isinstance(instruction, Run)
    return slots


def overlapping_operators(schedule: Schedule) -> list[str]:
    """Pairs of different operators that share a slot of time on different ranks, as a person reads them."""
    by_time: dict[int, list[Slot]] = defaultdict(list)
    for slot in play(schedule, steps=3):
        by_time[slot.start].append(slot)
    pairs: dict[str, None] = {}
    for slots in by_time.values():
        for a, b in combinations(slots, 2):
            if a.run.operator.name != b.run.operator.name:
                pairs[f"{a.run.operator.name} with {b.run.operator.name}{_distance(a, b)}"] = None
    return list(pairs)


def _distance(a: Slot, b: Slot) -> str:
    if a.step != b.step:
        return f" of the {'next' if b.step > a.step else 'last'} step"
    if a.run.chunk is not None and b.run.chunk is not None and a.run.chunk != b.run.chunk:
        return f" of {'a later' if b.run.chunk > a.run.chunk else 'an earlier'} chunk"
    return ""
