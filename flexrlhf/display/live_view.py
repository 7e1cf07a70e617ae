"""View of a run on a terminal, by rich: lines that stay, and below them a panel of four lines that change."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flexrlhf.display.events import Doing, Event, Note, RunBegins, RunEnds, StepDone
from flexrlhf.display.plain_lines import (
    LONG,
    WINDOW,
    duration,
    evaluation_text,
    fitting,
    header_lines,
    problems_text,
    seconds_left,
    shares_by_kind,
    shares_text,
    shown_metrics,
    throughput,
)

KEPT_LINES = 20
"""Lines of steps that a run leaves on the terminal, about."""
KEPT_SECONDS = 30.0
"""A step is worth a line after this time in any case."""
CELL = 9
"""Least width of a column of values."""
MOVING = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveView:
    """State of the runs of a command as their events leave it."""

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        """``what``: activity that is shown until the first event."""
        self._now = now
        self._begin: RunBegins | None = None
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW + 1)
        self._last: StepDone | None = None
        self._columns: list[str] = []
        self._kept_step, self._kept_at = -1, now()
        self._doing, self._since = Doing("", what), now()

    def lines(self, event: Event, width: int) -> list[Text]:
        """Take ``event``; return the lines that stay on the terminal."""
        kept = list(self._long())
        match event:
            case RunBegins():
                self._begin, self._last, self._columns = event, None, []
                self._rows.clear()
                self._kept_step, self._kept_at = -1, self._now()
                title, *places = header_lines(event.title, event.places)
                shown = [Text(place, no_wrap=True, overflow="ellipsis") for place in places]
                return [*kept, Text(""), Text(title, style="bold"), *shown]
            case Note():
                return [*kept, Text(f"{event.run}: {event.text}")]
            case StepDone():
                self._rows.append(event.row)
                self._last = event
                return [*kept, *self._step_lines(event, width)]
            case Doing():
                self._doing, self._since = event, self._now()
            case RunEnds():
                return [*kept, *self._end(event, width)]
        return kept

    def panel(self, width: int) -> RenderableType:
        """Return the lines that change."""
        waited = self._now() - self._since
        moving = MOVING[int(self._now() * 8) % len(MOVING)]
        shown = f" ({duration(waited)})" if waited > LONG else ""
        doing = _line(Text(f"{moving} {self._doing.what}{shown}", style="cyan"))
        if self._begin is None or self._last is None:
            return Group(Text(""), doing)
        newest = [] if self._last.step == self._kept_step else [self._numbers(self._last)]
        rate, shares = throughput([*self._rows]), shares_text(shares_by_kind([*self._rows]))
        return Group(
            *newest,
            Text(""),
            self._bar(self._begin, self._last, width),
            _line(Text.assemble(doing, f"  {rate}" if rate else "")),
            _line(Text(f"time of all ranks: {shares}" if shares else "", style="dim")),
        )

    def _long(self) -> Iterable[Text]:
        """Yield a line on the activity that this event ends, if it is rare and has taken long."""
        doing, seconds = self._doing, self._now() - self._since
        if doing.rare and seconds > LONG:
            where = f"{doing.run}: " if doing.step is None else f"step {doing.step}: "
            yield Text(f"{where if doing.run else ''}{doing.what}: {duration(seconds)}", style="dim")
            self._since = self._now()

    def _step_lines(self, event: StepDone, width: int) -> list[Text]:
        lines: list[Text] = []
        if not self._columns:
            self._columns = _columns(event, width)
            titles = "".join(f"  {name:>{_width(name)}}" for name in self._columns)
            lines.append(Text(f"{'step':>{_step_width(event)}}{titles}", style="bold"))
        problems, evaluation = problems_text(event.row), evaluation_text(event.row)
        every = max(1, event.steps // KEPT_LINES)
        is_turn = event.step % every == 0 or event.step + 1 == event.steps or len(self._rows) == 1
        if is_turn or self._now() - self._kept_at > KEPT_SECONDS or problems or evaluation:
            self._kept_step, self._kept_at = event.step, self._now()
            lines.append(self._numbers(event))
        indent = " " * (_step_width(event) + 2)
        if problems:
            lines.append(Text(indent + problems, style="yellow"))
        if evaluation:
            lines.append(Text(indent + evaluation, style="green"))
        return lines

    def _numbers(self, event: StepDone) -> Text:
        shown = {**shown_metrics(event.row), "s": event.row["seconds"]}
        cells = [f"{shown[name]:.4g}" if name in shown else "" for name in self._columns]
        texts = "".join(f"  {cell:>{_width(name)}}" for cell, name in zip(cells, self._columns, strict=True))
        return Text(f"{event.step:>{_step_width(event)}}{texts}", no_wrap=True, overflow="ellipsis")

    def _bar(self, begin: RunBegins, last: StepDone, width: int) -> RenderableType:
        left = seconds_left([row["seconds"] for row in self._rows], last.steps - last.step - 1)
        count = f"{last.step + 1}/{last.steps} steps"
        end = f"{count}, {duration(left)} left" if left else count
        name = begin.run if len(begin.run) <= width // 3 else begin.run[: width // 3 - 1] + "…"
        room = max(4, width - len(name) - len(end) - 4)
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text(name, style="bold"), ProgressBar(last.steps, last.step + 1, min(room, 60)), Text(end))
        return grid

    def _end(self, event: RunEnds, width: int) -> list[Text]:
        rate = throughput([*self._rows])
        done = f"{event.run}: {event.next_step} steps done" + (f", {rate}" if rate else "")
        # the next run begins with its own
        self._begin, self._last = None, None
        self._doing, self._since = Doing("", "ending the run", rare=False), self._now()
        return [Text(done, style="bold green")]


def _columns(event: StepDone, width: int) -> list[str]:
    """Return the metrics that fit next to each other, and the seconds."""
    names = list(shown_metrics(event.row))
    padded = [f"{name:>{_width(name)}}" for name in names]
    fixed = _step_width(event) + 2 + _width("s")
    return [*names[: len(fitting(fixed, padded, width))], "s"]


def _width(name: str) -> int:
    return 5 if name == "s" else max(CELL, len(name))


def _step_width(event: StepDone) -> int:
    return max(4, len(str(event.steps)))


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
