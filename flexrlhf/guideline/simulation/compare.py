"""A simulation beside the timeline of a run: what each instruction took, and what had been foretold.

Both sides are spans as the trainer records them, so both include waiting for other ranks. A Move's span is its posting;
what it takes shows in what Runs wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flexrlhf.errors import UserError
from flexrlhf.guideline.simulation.simulate import Simulation
from flexrlhf.timeline import Span, read_trace

WARM_UP_STEPS = 1
"""Steps that are left out: libraries load, allocators grow."""
Key = tuple[int, str, str, int, int | None]
"""Rank, kind, label, step, chunk."""


@dataclass(frozen=True)
class Pair:
    """Seconds of the same thing: of a run, and on paper."""

    measured: float
    predicted: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; None where there is nothing to compare."""
        return self.predicted / self.measured - 1 if self.measured and self.predicted else None


@dataclass(frozen=True)
class Line:
    """Spans of one kind and label: medians over ranks, steps and chunks; ``waited``: for columns, before the start."""

    kind: str
    label: str
    count: int
    seconds: Pair
    waited: Pair


@dataclass(frozen=True)
class Comparison:
    """``step``: seconds of one. ``steps``: those compared. ``missing``, ``extra``: spans that only one side has."""

    lines: tuple[Line, ...]
    step: Pair
    steps: range
    missing: Counter[Key]
    extra: Counter[Key]


def read_run(path: Path) -> list[Span]:
    """The spans of a run. Raises UserError for what is no timeline."""
    if not path.is_file():
        raise UserError(f"--against {path}: no such file; a run writes runs/<name>/timeline.json at its end")
    try:
        spans = read_trace(path)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--against {path}: not the timeline of a run ({type(error).__name__}: {error})") from None
    if not any(span.kind == "run" for span in spans):
        raise UserError(f"--against {path}: no run of an operator in it")
    return spans


def compare(simulation: Simulation, measured: Sequence[Span]) -> Comparison:
    """``measured``: all spans of a run, or of its last steps."""
    of_runs = [span.step for span in measured if span.kind == "run"]
    first, last = min(of_runs), max(of_runs)
    warm = min(WARM_UP_STEPS, last - first)
    steps = range(first + warm, last + 1)
    predicted = list(simulation.spans(last + 1))
    # the step that a long run's timeline begins with may be cut
    whole = first + (first > 0)
    found, wanted = (Counter(_key(span) for span in side if span.step >= whole) for side in (measured, predicted))
    return Comparison(
        lines=tuple(_lines(measured, predicted, steps)),
        step=Pair(step_seconds(measured, steps), step_seconds(predicted, steps)),
        steps=steps,
        missing=wanted - found,
        extra=found - wanted,
    )


def step_seconds(spans: Sequence[Span], steps: range) -> float:
    """From the end of the step before ``steps`` (or the start of the run) to the end of the last, for each."""
    ends: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind not in ("save", "eval"):
            ends[span.step] = max(ends[span.step], span.end)
    start = min(span.start for span in spans)
    return (ends[steps[-1]] - ends.get(steps[0] - 1, start)) / len(steps)


def _key(span: Span) -> Key:
    return span.rank, span.kind, span.label, span.step, span.chunk


def _lines(measured: Sequence[Span], predicted: Sequence[Span], steps: range) -> Iterable[Line]:
    ours, theirs = _by_label(predicted, steps), _by_label(measured, steps)
    for kind, label in ours:
        spans, others = ours[kind, label], theirs.get((kind, label), [])
        if others:
            seconds = Pair(_median(others, _duration), _median(spans, _duration))
            waited = Pair(_median(others, _waited), _median(spans, _waited))
            yield Line(kind, label, len(others), seconds, waited)


def _by_label(spans: Iterable[Span], steps: range) -> dict[tuple[str, str], list[Span]]:
    groups: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        if span.step in steps:
            groups[span.kind, span.label].append(span)
    return groups


def _median(spans: Iterable[Span], of: Callable[[Span], float]) -> float:
    return median(map(of, spans))


def _duration(span: Span) -> float:
    return span.end - span.start


def _waited(span: Span) -> float:
    return span.waited
