"""Plain lines of a run, for a file, a pipe or a log."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from flexrlhf.display.events import Doing, Event, Note, RunBegins, RunEnds, StepDone
from flexrlhf.display.step_text import (
    WINDOW,
    duration,
    evaluation_text,
    fitting,
    problems_text,
    seconds_left,
    shown_metrics,
    throughput,
)
from flexrlhf.text import table

WIDTH = 120
LONG = 1.0
"""Seconds after which something rare is worth a line."""


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


def print_plainly() -> PlainLines:
    """Return a printer to stdout."""
    return PlainLines(lambda text: print(text, flush=True), width_of_output())
