"""Runs side by side as text: their numbers and settings first, then their times.

A rank waits while it has no instruction: columns that it needs are still under way, or there is nothing to do for it.
Waiting inside a collective is a part of that instruction. A Move's span is its posting alone.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flexrlhf.api import (
    METRICS,
    OperatorKind,
    SettingDifference,
    Span,
    WorkKind,
    bytes_text,
    counted,
    one_line,
    shortened,
    shown,
    table,
)
from flexrlhf.report.metric_table import MetricTable, Series
from flexrlhf.report.run_contents import RecordedSteps
from flexrlhf.report.step_times import WAITING, busy_seconds, settled_steps, step_times

SAME = 1e-4
"""Largest difference over the scale of a metric that is called the same: of float32 sums in another order."""
LEAST_SCALE = 1e-2
"""Scale of metrics that are rounding alone, such as the KL of a policy from itself."""
MOST_LISTED = 100
"""Metrics that are listed without ``--all``, the main ones aside."""


@dataclass(frozen=True)
class MetricDifference:
    """One metric of two runs.

    name:     of the metric
    first:    its value in the first run, in the last step that both have
    second:   the same of the other run
    largest:  largest absolute difference of a step; infinite where one of the two is no number
    step:     the step with it
    values:   of both runs in that step
    scale:    largest absolute value of the metric in both runs, at least LEAST_SCALE
    """

    name: str
    first: float
    second: float
    largest: float
    step: int
    values: tuple[float, float]
    scale: float

    @property
    def relative(self) -> float:
        """The largest difference over the larger of the two values of its step, without their signs."""
        if self.largest == 0 or math.isinf(self.largest):
            return self.largest
        return self.largest / max(map(abs, self.values))

    @property
    def of_scale(self) -> float:
        """The largest difference over the scale, which tells rounding of a value near 0 from a difference."""
        return self.largest / self.scale

    @property
    def is_same(self) -> bool:
        """Whether the two runs differ by no more than rounding."""
        return self.of_scale <= SAME


def metric_differences(first: MetricTable, second: MetricTable) -> list[MetricDifference]:
    """Return the differences of all metrics that both runs have, times aside, in the order of their definitions."""
    defined = [metric.name for metric in METRICS]
    written = sorted({*first.names, *second.names} - set(defined))
    names = [name for name in (*defined, *written) if name not in METRICS.times]
    found = [_difference(name, *_in_common(first.series(name), second.series(name))) for name in names]
    return [each for each in found if each is not None]


def _in_common(first: Series, second: Series) -> tuple[Series, Series]:
    """Return two series in the steps that both have."""
    if first.steps == second.steps:
        return first, second
    steps = common_steps(first.steps, second.steps)
    known = (dict(zip(each.steps, each.values, strict=True)) for each in (first, second))
    one, other = (Series(steps, [values[step] for step in steps]) for values in known)
    return one, other


def common_steps(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the steps of both runs, each of whose steps ascend."""
    known = {*second}
    return [step for step in first if step in known]


def _difference(name: str, first: Series, second: Series) -> MetricDifference | None:
    if not first:
        return None
    ones, others = first.values, second.values
    sizes = (_distance(one, other) for one, other in zip(ones, others, strict=True))
    # of equal sizes the first one
    largest, behind = max((size, -place) for place, size in enumerate(sizes))
    worst = -behind
    known = (abs(value) for values in (ones, others) for value in values if math.isfinite(value))
    return MetricDifference(
        name,
        ones[-1],
        others[-1],
        largest,
        first.steps[worst],
        (ones[worst], others[worst]),
        max(LEAST_SCALE, max(known, default=0.0)),
    )


def _distance(one: float, other: float) -> float:
    """Return |one - other|; 0 for two that are no numbers or the same infinity."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    size = abs(one - other)
    return size if math.isfinite(size) else math.inf


MOST_RANKS = 8
"""Ranks whose waiting is listed one by one."""
HIDDEN = f"that differ by less than {SAME:g} of their size (--all lists them)"
NOT_LISTED = "that differ by less than these of their size (--all lists them)"
LEAST_SECONDS = 5e-4
"""Work that takes less in every run is not listed."""
MAIN = frozenset(metric.name for metric in METRICS if metric.progress)
WIDEST = 110
"""Characters of a line."""
MOST_CHARACTERS = 80
"""Characters of a value."""


def format_runs(runs: Sequence[RecordedSteps], shows_all: bool = False) -> str:
    """Return the runs side by side; the others are compared with the first one.

    ``shows_all``: list every metric, not the main ones and those that differ alone.
    """
    lines = [f"{letter}  {run.name}: {run.title.partition(': ')[2]}" for letter, run in _lettered(runs)]
    first = runs[0]
    for letter, run in _lettered(runs)[1:]:
        lines += ["", *_numbers(first, run, letter, shows_all)]
    damage = [line for run in runs for line in run.damage]
    return "\n".join([*lines, "", *_times(runs), *map(one_line, damage)])


def _lettered(runs: Sequence[RecordedSteps]) -> list[tuple[str, RecordedSteps]]:
    return [(chr(ord("A") + number), run) for number, run in enumerate(runs)]


def _numbers(first: RecordedSteps, other: RecordedSteps, letter: str, shows_all: bool) -> list[str]:
    steps = common_steps(first.rows.steps, other.rows.steps)
    if not steps:
        return [f"A and {letter} have no step in common"]
    found = metric_differences(first.rows, other.rows)
    settings = first.spec.differences(other.spec)
    listed = [each for each in found if each.name not in MAIN and (shows_all or not each.is_same)]
    if not shows_all:
        listed = sorted(listed, key=lambda each: -each.of_scale)[:MOST_LISTED]
    chosen = {each.name for each in listed}
    shown = [each for each in found if each.name in MAIN or each.name in chosen]
    rows = [["metric", "A", letter, "largest difference", "relative", "step"], *map(_row, shown)]
    rest = len(found) - len(shown)
    return [
        f"numbers of A and {letter} over {counted(len(steps), 'step')}: {_verdict(found)}",
        *(line for each in settings for line in setting_lines(each)),
        *(f"  {line}" for line in table(rows, "<>>>>>")),
        *([f"  and {counted(rest, 'metric')} {HIDDEN if len(listed) < MOST_LISTED else NOT_LISTED}"] if rest else []),
    ]


def _verdict(found: Sequence[MetricDifference]) -> str:
    if not found:
        return "no metric in common"
    worst = max(found, key=lambda each: each.of_scale)
    if worst.largest == 0:
        return f"the same to the last digit, all {counted(len(found), 'metric')}"
    example = f"{worst.name} of step {worst.step} is {_both(*worst.values)}"
    return f"the same but for rounding ({example})" if worst.is_same else f"not the same: {example}"


def _both(first: float, second: float) -> str:
    """Return two different values with as many digits as show their difference."""
    texts = [(f"{first:.{digits}g}", f"{second:.{digits}g}") for digits in (4, 6, 9, 17)]
    return " and ".join(next((both for both in texts if both[0] != both[1]), texts[-1]))


def _row(each: MetricDifference) -> list[str]:
    relative = f"{each.relative:.1e}" if each.relative else "0"
    values = [f"{each.first:.6g}", f"{each.second:.6g}", f"{each.largest:.2g}", relative]
    return [shortened(one_line(each.name), MOST_CHARACTERS), *values, str(each.step)]


def _times(runs: Sequence[RecordedSteps]) -> list[str]:
    """Return the time of a step by kind of work, and bytes."""
    times = [mean_times(run.spans, run.kinds) for run in runs]
    known = [each for each in times if each is not None]
    letters = [letter for letter, _ in _lettered(runs)]
    missing = [letter for letter, each in zip(letters, times, strict=True) if each is None]
    notes = [f"no timeline of {', '.join(missing)}"] if missing else []
    if not known:
        return notes
    kinds = [kind.text for kind in WorkKind]
    work = [name for name in kinds if any(each.work.get(name, 0.0) >= LEAST_SECONDS for each in known)]
    rows = [
        ["", *letters],
        ["seconds of a step", *_cells(times, lambda each: f"{each.seconds:.3f}")],
        *([f"  {name}", *_cells(times, partial(_work_cell, name))] for name in work),
        [f"  {WAITING}", *_cells(times, lambda each: _share(each, each.mean_waiting))],
        *_waiting_of_ranks(times, known),
        ["bytes of columns moved", *_cells(times, lambda each: bytes_text(round(each.moved_bytes)))],
        ["bytes of weights synced", *_cells(times, lambda each: bytes_text(round(each.synced_bytes)))],
    ]
    spans = {f"{each.steps.start}-{each.steps[-1]}" for each in known}
    head = f"times of one step, means over ranks and steps {' or '.join(sorted(spans))}"
    return [head, *(f"  {line}" for line in table(rows, "<" + ">" * len(runs))), *notes]


def _waiting_of_ranks(times: Sequence[StepTimes | None], known: Sequence[StepTimes]) -> list[list[str]]:
    """Return a row for the waiting of each rank, or of many the least and the most."""
    ranks = sorted({rank for each in known for rank in each.waiting})
    if len(ranks) > MOST_RANKS:
        least = ["    of the rank that waits least", *_cells(times, lambda e: _share(e, min(e.waiting.values())))]
        most = ["    of the rank that waits most", *_cells(times, lambda e: _share(e, max(e.waiting.values())))]
        return [least, most]
    return [[f"    of rank {rank}", *_cells(times, partial(_rank_cell, rank))] for rank in ranks]


def _work_cell(name: str, times: StepTimes) -> str:
    return _share(times, times.work.get(name, 0.0))


def _rank_cell(rank: int, times: StepTimes) -> str:
    return _share(times, times.waiting[rank]) if rank in times.waiting else "-"


def _share(times: StepTimes, seconds: float) -> str:
    share = seconds / times.seconds if times.seconds else 0.0
    return f"{seconds:.3f} {share:4.0%}"


def _cells(times: Sequence[StepTimes | None], text: Callable[[StepTimes], str]) -> list[str]:
    return ["-" if each is None else text(each) for each in times]


def setting_lines(difference: SettingDifference) -> Iterator[str]:
    """Yield the lines of one setting; of lists of mappings, lines of each key that differs."""
    for each in _inner(difference):
        text = f"a setting that numbers depend on differs: {each.key} is {_text(each.first)} and {_text(each.second)}"
        yield from textwrap.wrap(
            text, WIDEST, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )


def _inner(difference: SettingDifference) -> Iterator[SettingDifference]:
    """Yield the differences within two lists of mappings of other lengths, by place."""
    first, second = (_by_place(value) for value in (difference.first, difference.second))
    if first is None or second is None:
        yield difference
    else:
        yield from SettingDifference.between(first, second, difference.key)


def _by_place(value: Any) -> dict[str, Any] | None:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(place): item for place, item in enumerate(value)}
    return None


def _text(value: Any) -> str:
    """Return a value; of a mapping, which the other run lacks, its settings."""
    return shown(_set(value)) if isinstance(value, dict) else shortened(shown(value), MOST_CHARACTERS)


def _set(value: Any) -> Any:
    """Return a value without the keys that are null or empty in its mappings."""
    if not isinstance(value, dict):
        return value
    return {key: _set(item) for key, item in value.items() if item is not None and item != [] and item != {}}


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

    def work(span: Span) -> WorkKind:
        return WorkKind.of(span.kind, kinds.get(span.label.rpartition(" on ")[0]))

    ranks = busy_seconds(spans, start, end, work)
    sums = {kind: sum(seconds.get(kind, 0.0) for seconds in ranks.values()) for kind in WorkKind}
    counted = [span for span in spans if span.step in steps]
    return StepTimes(
        steps=steps,
        seconds=(end - start) / len(steps),
        work={kind.text: seconds / len(ranks) / len(steps) for kind, seconds in sums.items() if seconds},
        waiting={rank: max(0.0, end - start - sum(busy.values())) / len(steps) for rank, busy in ranks.items()},
        moved_bytes=_bytes(counted, "move") / len(steps),
        synced_bytes=_bytes(counted, "sync") / len(steps),
    )


def _bytes(spans: Sequence[Span], kind: str) -> int:
    return sum(span.bytes_sent or 0 for span in spans if span.kind == kind)
