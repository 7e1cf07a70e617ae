"""Seconds of a step by kind of work, from the spans of a run.

A rank waits while it has no instruction: columns that it needs are still under way, or there is nothing to do for it.
What it waits for inside a collective is a part of that instruction. A Move's span is its posting alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.operators.graph import OperatorKind
from flexrlhf.operators.work import TITLES, Work, work_of
from flexrlhf.report.step_times import busy_seconds, settled_steps, step_times
from flexrlhf.timeline import Span


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a run's steps by kind of work, and bytes that cross between ranks.

    steps:        the steps that count, by number: all but the first, in which libraries load
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


def mean_times(spans: Sequence[Span], kinds: Mapping[str, OperatorKind]) -> StepTimes | None:
    """Return the times of a run's steps; None without spans. ``kinds``: of operators, by name."""
    times = settled_steps(step_times(spans, is_complete=True))
    if not times:
        return None
    steps, start, end = range(times[0].step, times[-1].step + 1), times[0].start, times[-1].end

    def work(span: Span) -> Work:
        return work_of(span.kind, kinds.get(span.label.rpartition(" on ")[0]))

    ranks = busy_seconds(spans, start, end, work)
    sums = {kind: sum(seconds.get(kind, 0.0) for seconds in ranks.values()) for kind in TITLES}
    counted = [span for span in spans if span.step in steps]
    return StepTimes(
        steps=steps,
        seconds=(end - start) / len(steps),
        work={TITLES[kind]: seconds / len(ranks) / len(steps) for kind, seconds in sums.items() if seconds},
        waiting={rank: max(0.0, end - start - sum(busy.values())) / len(steps) for rank, busy in ranks.items()},
        moved_bytes=_bytes(counted, "move") / len(steps),
        synced_bytes=_bytes(counted, "sync") / len(steps),
    )


def _bytes(spans: Sequence[Span], kind: str) -> int:
    return sum(span.bytes_sent or 0 for span in spans if span.kind == kind)
