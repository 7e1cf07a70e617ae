"""A run in words: metrics, throughput, time left and shares of time; and plain lines for a file, a pipe or a log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flexrlhf.display.events import Doing, Event, EventFile, EventSender, Note, RunBegins, RunEnds, StepDone
from flexrlhf.metrics import METRICS
from flexrlhf.text import counted, span_of, table

OF_TIME = "time_"
EVALUATION = "eval_"
WINDOW = 20
"""Steps of which throughput and time left are means."""
LEAST_SHARE = 0.005
WIDTH = 120
LONG = 1.0
"""Time after which something rare is worth a line, in seconds."""


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``12 s``, ``1:05`` minutes or ``2:03:10`` hours."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    return f"{minutes}:{second:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def rate(value: float) -> str:
    """Return a number in a second with three digits, as ``0.52``, ``64`` or ``1.24k``."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def seconds_left(seconds: Sequence[float], remaining: int) -> float | None:
    """Return the time of the ``remaining`` steps, given the ``seconds`` of the steps before; None without any.

    It is the mean of the last ones, without the first one if there are others: that one warms everything up.
    """
    usual = seconds[1:] or seconds
    recent = usual[-WINDOW:]
    return remaining * sum(recent) / len(recent) if recent else None


def throughput(rows: Sequence[Mapping[str, float]], most: int = WINDOW) -> str:
    """Return samples and tokens in a second over the last rows of metrics, at ``most`` so many; else an empty text."""
    parts = []
    for noun in ("samples", "tokens"):
        found = [row for row in rows[-most:] if f"{noun}_per_second" in row]
        seconds = sum(row["seconds"] for row in found)
        if seconds > 0:
            number = sum(row[f"{noun}_per_second"] * row["seconds"] for row in found)
            parts.append(f"{rate(number / seconds)} {noun}/s")
    return ", ".join(parts)


def shares_by_kind(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each kind of work in the time of ``rows``, the kinds in the order of the metrics."""
    names = [metric.name for metric in METRICS if metric.name.startswith(OF_TIME)]
    counted = [row for row in rows if any(name in row for name in names)]
    total = sum(row["seconds"] for row in counted)
    if total <= 0:
        return {}
    sums = {name: sum(row.get(name, 0.0) * row["seconds"] for row in counted) for name in names}
    return {name.removeprefix(OF_TIME): value / total for name, value in sums.items() if value >= LEAST_SHARE * total}


def shares_text(shares: Mapping[str, float]) -> str:
    """Return ``generate 41 %, train 30 %, wait 29 %``."""
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in shares.items())


def shown_metrics(row: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of training that are shown while it goes on."""
    return _chosen(row, (m.name for m in METRICS if m.progress and not m.name.startswith(EVALUATION)))


def evaluation_text(row: Mapping[str, float]) -> str:
    """Return the metrics of the evaluation after the step, if any."""
    return _pairs(_chosen(row, (m.name for m in METRICS if m.progress and m.name.startswith(EVALUATION))))


def problems_text(row: Mapping[str, float]) -> str:
    """Return the metrics that should be 0 and are not."""
    return _pairs(
        {name: value for name, value in _chosen(row, (m.name for m in METRICS if m.is_problem)).items() if value}
    )


def restarts_text(rows: Sequence[Mapping[str, float]]) -> str:
    """Return ``2 restarts of rollout processes, in steps 3,7``; empty if a run has none."""
    numbers = {int(row["step"]): int(row["rollout_restarts"]) for row in rows if row.get("rollout_restarts")}
    steps = f"{'step' if len(numbers) == 1 else 'steps'} {span_of(tuple(numbers))}"
    return f"{counted(sum(numbers.values()), 'restart')} of rollout processes, in {steps}" if numbers else ""


def _chosen(row: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    return {name: row[name] for name in names if name in row}


def _pairs(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def fitting(fixed: int, parts: Sequence[str], width: int) -> list[str]:
    """Return the first of ``parts`` that fit into ``width`` next to ``fixed`` characters, two spaces before each."""
    kept = []
    for part in parts:
        fixed += len(part) + 2
        if fixed > width:
            break
        kept.append(part)
    return kept


def width_of_output() -> int:
    """Return the columns of the terminal that stdout is, else those of COLUMNS, else 120."""
    if sys.stdout.isatty():
        return os.get_terminal_size(sys.stdout.fileno()).columns
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH


def header_lines(title: str, places: Sequence[Sequence[str]]) -> list[str]:
    """Return the title of a run and a line for each placed model."""
    return [title, *(f"  {line}" for line in (table(places, "<" * len(places[0])) if places else ()))]


def step_lines(event: StepDone, rows: Sequence[Mapping[str, float]], width: int) -> list[str]:
    """Return the lines of a step: metrics, seconds, throughput and time left, as much as fits; then its evaluation.

    If there is little room, the first two metrics go before the time left, that before throughput, and all before
    further metrics. ``rows``: metrics of the steps so far, that of ``event`` last.
    """
    head = f"{event.run}  step {event.step + 1}/{event.steps}"
    metrics = [f"{name} {value:.4g}" for name, value in shown_metrics(event.row).items()]
    left = seconds_left([row["seconds"] for row in rows], event.steps - event.step - 1)
    problems = list(filter(None, [problems_text(event.row)]))
    first, further = metrics[:2], metrics[2:]
    times = [f"{duration(left)} left"] if left else []
    times += list(filter(None, [throughput(rows[-1:])]))
    seconds = f"{event.row['seconds']:.1f} s"
    kept = fitting(len("  ".join([head, *problems, seconds])), [*first, *times, *further], width)
    shown = [part for part in metrics if part in kept]
    end = ", ".join([seconds, *(part for part in reversed(times) if part in kept)])
    lines = ["  ".join([head, *problems, *shown, end])]
    evaluation = evaluation_text(event.row)
    return lines + ([f"{head}  {evaluation}"] if evaluation else [])


class PlainLines:
    """Printer of events: each step, the events before the first one, and rare ones that take long."""

    def __init__(self, write: Callable[[str], None], width: int, now: Callable[[], float] = time.monotonic) -> None:
        self._write, self._width, self._now = write, width, now
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW + 1)
        self._doing: Doing | None = None
        self._since = 0.0

    def __call__(self, event: Event) -> None:
        """Print the lines of ``event``, if it has any."""
        self._end_of_what_was_done()
        match event:
            case RunBegins():
                self._rows.clear()
                self._write("\n".join(["", *header_lines(event.title, event.places)]))
            case Note():
                self._write(f"{event.run}: {event.text}")
            case Doing():
                self._doing, self._since = event, self._now()
                if event.step is None:
                    self._write(f"{event.run}: {event.what}")
            case StepDone():
                self._rows.append(event.row)
                for line in step_lines(event, [*self._rows], self._width):
                    self._write(line)
            case RunEnds():
                pass

    def _end_of_what_was_done(self) -> None:
        """Print how long something rare has taken, which ends with the next event."""
        doing, seconds = self._doing, self._now() - self._since
        self._doing = None
        if doing is not None and doing.rare and seconds > LONG:
            where = "" if doing.step is None else f"step {doing.step}: "
            self._write(f"{doing.run}: {where}{doing.what}: {duration(seconds)}")


def open_events(file: Path | None) -> EventSender:
    """Return the sender of rank 0's events: to a ``file`` that the launcher reads, or in lines to stdout."""
    if file is not None:
        return EventSender(EventFile(file))
    return EventSender(PlainLines(lambda text: print(text, flush=True), width_of_output()))
