"""Steps of a timeline: where each begins and ends, and the activities of each rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flexrlhf.api import Span
from flexrlhf.report.look import PARTS, InstructionStyles

WAITING = "waiting"
SHARES = (*PARTS, WAITING)
Kind = TypeVar("Kind", bound=str)


@dataclass(frozen=True)
class StepTime:
    """Time of one step: from the end of the step before it, or the start of the timeline, to its own end.

    step:        its number, from 0
    start, end:  seconds
    """

    step: int
    start: float
    end: float


def step_times(spans: Sequence[Span], is_complete: bool) -> tuple[StepTime, ...]:
    """Return the steps whose instructions are all in ``spans``.

    ``is_complete``: whether the last one has ended. The first one may have lost instructions unless it begins the run.
    Evaluations and saves end no step, as in the comparison of ``simulate``.
    """
    ends: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind not in ("save", "eval", "checkpoint"):
            ends[span.step] = max(ends[span.step], span.end)
    steps = sorted(ends)
    start = min((span.start - span.waited for span in spans), default=0.0)
    times = []
    for place, step in enumerate(steps):
        times.append(StepTime(step, start, max(start, ends[step])))
        start = times[place].end
    times = times if is_complete or len(times) < 2 else times[:-1]
    return tuple(times[1:] if len(times) > 1 and times[0].step > 0 else times)


def last_steps(times: Sequence[StepTime], spans: Sequence[Span], most_steps: int, most_spans: int) -> list[StepTime]:
    """Return the last of ``times``, at least one, with at most so many steps and about so many spans."""
    counts = Counter(span.step for span in spans)
    chosen: list[StepTime] = []
    total = 0
    for time in reversed(times):
        total += counts[time.step]
        if chosen and (len(chosen) == most_steps or total > most_spans):
            break
        chosen.insert(0, time)
    return chosen


def settled_steps(times: Sequence[StepTime]) -> Sequence[StepTime]:
    """Return ``times`` without the first step of the run, in which libraries load, if there are others."""
    return times[1:] if len(times) > 1 and times[0].step == 0 else times


def busy_seconds(
    spans: Iterable[Span], start: float, end: float, kind_of: Callable[[Span], Kind]
) -> dict[int, dict[Kind, float]]:
    """Return the seconds from ``start`` to ``end`` in which a rank has an instruction: rank → kind → seconds.

    Time that two instructions of a rank have in common counts for the one that begins first. ``kind_of``: kind of what
    an instruction does, or the part of a figure that it is in.
    """
    seconds: dict[int, dict[Kind, float]] = {}
    reached: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        own = seconds.setdefault(span.rank, defaultdict(float))
        begin, finish = max(span.start, reached.get(span.rank, start)), min(span.end, end)
        if finish > begin:
            own[kind_of(span)] += finish - begin
            reached[span.rank] = finish
    return dict(sorted(seconds.items()))


def time_shares(
    spans: Sequence[Span], start: float, end: float, styles: InstructionStyles
) -> Mapping[int, Mapping[str, float]]:
    """Return the share of each of ``SHARES`` in the time from ``start`` to ``end`` by rank; together 1.

    Waiting is the rest: for columns before an instruction, and between instructions.
    """
    busy = busy_seconds(spans, start, end, lambda span: styles.of(span.kind, span.label).part)
    period = (end - start) or 1.0
    return {rank: _shares(seconds, period) for rank, seconds in busy.items()}


def _shares(seconds: Mapping[str, float], period: float) -> Mapping[str, float]:
    shares = {part: seconds.get(part, 0.0) / period for part in PARTS}
    return shares | {WAITING: max(0.0, 1.0 - sum(shares.values()))}
