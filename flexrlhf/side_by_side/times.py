"""Seconds of a step by kind of work, from the spans of a run.

A rank waits while it has no instruction: columns that it needs are still under way, or there is nothing to do for it.
What it waits for inside a collective is a part of that instruction. A Move's span is its posting alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.operators.graph import OperatorKind
from flexrlhf.operators.work import TITLES, Work, work_of
from flexrlhf.timeline import Span

WARM_UP_STEPS = 1
"""First steps that are left out: libraries load, allocators grow."""
WAITING = "waiting"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a run's steps by kind of work, and bytes that cross between ranks.

    steps:        the steps that count, by number: all but the first of the timeline
    seconds:      of one step
    work:         title of a kind of work → seconds in one step, mean over ranks
    waiting:      rank → seconds in one step without an instruction
    moved_bytes:  bytes of columns that cross between ranks in one step
    synced_bytes: bytes of weights that do
    """

    steps: range
    seconds: float
    work: Mapping[str, float]
    waiting: Mapping[int, float]
    moved_bytes: float
    synced_bytes: float

    @property
    def mean_waiting(self) -> float:
        """Mean over ranks."""
        return sum(self.waiting.values()) / len(self.waiting)


def step_times(spans: Sequence[Span], kinds: Mapping[str, OperatorKind]) -> StepTimes | None:
    """Return the times of a run's steps; None without spans. ``kinds``: of operators, by name."""
    if not spans:
        return None
    first, last = min(span.step for span in spans), max(span.step for span in spans)
    warm = min(WARM_UP_STEPS, last - first)
    steps = range(first + warm, last + 1)
    before = [span.end for span in spans if span.step not in steps]
    start = max(before) if before else min(span.start - span.waited for span in spans)
    end = max(span.end for span in spans)
    ranks = sorted({span.rank for span in spans})
    work: dict[Work, float] = defaultdict(float)
    busy = dict.fromkeys(ranks, 0.0)
    for span in spans:
        seconds = max(0.0, min(span.end, end) - max(span.start, start))
        busy[span.rank] += seconds
        work[work_of(span.kind, kinds.get(span.label.rpartition(" on ")[0]))] += seconds / len(ranks) / len(steps)
    counted = [span for span in spans if span.step in steps]
    return StepTimes(
        steps=steps,
        seconds=(end - start) / len(steps),
        work={title: work[kind] for kind, title in TITLES.items() if kind in work},
        waiting={rank: max(0.0, end - start - busy[rank]) / len(steps) for rank in ranks},
        moved_bytes=_bytes(counted, "move") / len(steps),
        synced_bytes=_bytes(counted, "sync") / len(steps),
    )


def _bytes(spans: Sequence[Span], kind: str) -> int:
    return sum(span.bytes_sent or 0 for span in spans if span.kind == kind)
