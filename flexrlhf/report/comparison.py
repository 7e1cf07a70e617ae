"""Runs side by side as text: their numbers first, then their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flexrlhf.config.number_settings import differing_settings
from flexrlhf.metrics import METRICS
from flexrlhf.operators.work import TITLES
from flexrlhf.report.metric_differences import SAME, MetricDifference, common_steps, metric_differences
from flexrlhf.report.recorded_steps import RecordedSteps
from flexrlhf.report.setting_lines import setting_lines
from flexrlhf.report.step_times import WAITING
from flexrlhf.report.times_by_kind import StepTimes, mean_times
from flexrlhf.text import bytes_text, counted, table

MOST_RANKS = 8
"""Ranks whose waiting is listed one by one."""
HIDDEN = f"that differ by less than {SAME:g} of their size (--all lists them)"
LEAST_SECONDS = 5e-4
"""Work that takes less in every run is not listed."""
MAIN = frozenset(metric.name for metric in METRICS if metric.progress)


def format_runs(runs: Sequence[RecordedSteps], shows_all: bool = False) -> str:
    """Return the runs side by side; the first one is what the others are compared with.

    ``shows_all``: list every metric, not the main ones and those that differ alone.
    """
    lines = [f"{letter}  {run.name}: {run.title.partition(': ')[2]}" for letter, run in _lettered(runs)]
    first = runs[0]
    for letter, run in _lettered(runs)[1:]:
        lines += ["", *_numbers(first, run, letter, shows_all)]
    return "\n".join([*lines, "", *_times(runs)])


def _lettered(runs: Sequence[RecordedSteps]) -> list[tuple[str, RecordedSteps]]:
    return [(chr(ord("A") + number), run) for number, run in enumerate(runs)]


def _numbers(first: RecordedSteps, other: RecordedSteps, letter: str, shows_all: bool) -> list[str]:
    """Return the differences of one run from the first."""
    steps = common_steps([first.rows, other.rows])
    if not steps:
        return [f"A and {letter} have no step in common"]
    found = metric_differences(first.rows, other.rows)
    settings = differing_settings(first.spec, other.spec)
    shown = [each for each in found if shows_all or each.name in MAIN or not each.is_same]
    rows = [["metric", "A", letter, "largest difference", "relative", "step"], *map(_row, shown)]
    rest = len(found) - len(shown)
    return [
        f"numbers of A and {letter} over {counted(len(steps), 'step')}: {_verdict(found)}",
        *(line for each in settings for line in setting_lines(each)),
        *(f"  {line}" for line in table(rows, "<>>>>>")),
        *([f"  and {counted(rest, 'metric')} {HIDDEN}"] if rest else []),
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
    values = [f"{each.first:.6g}", f"{each.second:.6g}", f"{each.largest:.2g}", _relative(each.relative)]
    return [each.name, *values, str(each.step)]


def _relative(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def _times(runs: Sequence[RecordedSteps]) -> list[str]:
    """Return seconds of a step by kind of work, and bytes."""
    times = [mean_times(run.spans, run.kinds) for run in runs]
    known = [each for each in times if each is not None]
    letters = [letter for letter, _ in _lettered(runs)]
    missing = [letter for letter, each in zip(letters, times, strict=True) if each is None]
    notes = [f"no timeline of {', '.join(missing)}"] if missing else []
    if not known:
        return notes
    work = [name for name in TITLES.values() if any(each.work.get(name, 0.0) >= LEAST_SECONDS for each in known)]
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
