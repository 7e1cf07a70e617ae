"""Comparison of a simulation with the timeline of a run: measured and predicted time of each instruction.

Both are spans as the trainer records them, so both include waiting for other ranks. A Move's span is its posting; its
duration shows in the waiting of Runs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flexrlhf.api import Span, Trace, UserError, instead_of
from flexrlhf.guideline.simulation.simulate import Simulation

WARM_UP_STEPS = 1
"""First steps that are left out: libraries load, allocators grow."""
SpanKey = tuple[int, str, str, int, int | None]
"""Rank, kind, label, step, chunk."""


@dataclass(frozen=True)
class TimePair:
    """Seconds of the same instruction or step in a run and in its simulation."""

    measured: float
    predicted: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; None where there is nothing to compare."""
        return self.predicted / self.measured - 1 if self.measured and self.predicted else None


@dataclass(frozen=True)
class SpanComparison:
    """Spans of one kind and label, medians over ranks, steps and chunks.

    kind:     kind of the instruction
    label:    its label
    count:    measured spans
    seconds:  durations
    waited:   waiting for columns before the start
    """

    kind: str
    label: str
    count: int
    seconds: TimePair
    waited: TimePair


@dataclass(frozen=True)
class Comparison:
    """A run compared with its simulation.

    lines:    comparison by kind and label
    step:     time of a step
    steps:    steps that are compared
    missing:  predicted spans that were not measured
    extra:    measured spans that were not predicted
    """

    lines: tuple[SpanComparison, ...]
    step: TimePair
    steps: range
    missing: Counter[SpanKey]
    extra: Counter[SpanKey]


def read_run(path: Path) -> list[Span]:
    """Return the spans of a run. Raises UserError for a file that is no timeline."""
    if not path.is_file():
        raise UserError(
            f"--against {path}: no such file{instead_of(path, '.json')}; a run writes runs/<name>/timeline.json at its "
            f"end"
        )
    try:
        spans = list(Trace.read(path).spans)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--against {path}: not the timeline of a run ({type(error).__name__}: {error})") from None
    if not any(span.kind == "run" for span in spans):
        raise UserError(f"--against {path}: no run of an operator in it")
    return spans


def compare(simulation: Simulation, measured: Sequence[Span]) -> Comparison:
    """Compare ``simulation`` with ``measured``: all spans of a run, or of its last steps."""
    run_steps = [span.step for span in measured if span.kind == "run"]
    first, last = min(run_steps), max(run_steps)
    warm = min(WARM_UP_STEPS, last - first)
    steps = range(first + warm, last + 1)
    predicted = list(simulation.spans(last + 1))
    # the first step in a long run's timeline may be incomplete
    complete = first + (first > 0)
    measured_keys, predicted_keys = (
        Counter(_key(span) for span in spans if span.step >= complete) for spans in (measured, predicted)
    )
    return Comparison(
        lines=tuple(_lines(measured, predicted, steps)),
        step=TimePair(step_seconds(measured, steps), step_seconds(predicted, steps)),
        steps=steps,
        missing=predicted_keys - measured_keys,
        extra=measured_keys - predicted_keys,
    )


def step_seconds(spans: Sequence[Span], steps: range) -> float:
    """Return the mean time of ``steps``: from the end of the step before them (or the start of the run) to the end
    of the last."""
    ends: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind not in ("save", "eval"):
            ends[span.step] = max(ends[span.step], span.end)
    start = min(span.start for span in spans)
    return (ends[steps[-1]] - ends.get(steps[0] - 1, start)) / len(steps)


def _key(span: Span) -> SpanKey:
    return span.rank, span.kind, span.label, span.step, span.chunk


def _lines(measured: Sequence[Span], predicted: Sequence[Span], steps: range) -> Iterable[SpanComparison]:
    measured_spans = _by_label(measured, steps)
    for (kind, label), ours in _by_label(predicted, steps).items():
        theirs = measured_spans.get((kind, label), [])
        if theirs:
            seconds = TimePair(*(median(span.end - span.start for span in spans) for spans in (theirs, ours)))
            waited = TimePair(*(median(span.waited for span in spans) for spans in (theirs, ours)))
            yield SpanComparison(kind, label, len(theirs), seconds, waited)


def _by_label(spans: Iterable[Span], steps: range) -> dict[tuple[str, str], list[Span]]:
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.step in steps:
            groups[span.kind, span.label].append(span)
    return groups
