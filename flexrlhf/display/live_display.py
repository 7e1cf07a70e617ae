"""Display of the runs of a command on a terminal, in the process that starts the ranks.

A display moves the cursor over lines that it draws again. Output of ranks and libraries would land in the middle of
it, so their stdout and stderr are a pipe, whose lines are printed above the display.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from flexrlhf.display.events import EventReader

STDOUT, STDERR = 1, 2


def is_terminal() -> bool:
    """Return whether stdout is a terminal on which a cursor can be moved, and not replaced as in a notebook."""
    try:
        is_stdout = sys.stdout.fileno() == STDOUT
    except (OSError, ValueError, AttributeError):
        # a stream of Python's alone
        return False
    return is_stdout and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class CapturedLines:
    """Lines that come out of a pipe."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._rest = b""
        self._is_open = True

    def read(self, seconds: float) -> list[str]:
        """Return the whole lines that come within ``seconds``, at once when there are some."""
        if not self._is_open:
            return []
        ready, _, _ = select.select([self._end], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._end, 65536)
        self._is_open = bool(data)
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        return [_shown(line) for line in lines]

    def rest(self) -> list[str]:
        """Return the lines that have come in the meantime, and the last line also if it has no end."""
        lines: list[str] = []
        while found := self.read(0.0):
            lines += found
        return lines + ([_shown(self._rest)] if self._rest else [])


def _shown(line: bytes) -> str:
    """Return a line as a terminal would show it in the end: the text behind the last carriage return."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


@contextmanager
def captured_output() -> Iterator[tuple[TextIO, CapturedLines]]:
    """Yield the terminal that stdout was, and the lines that go to stdout and stderr meanwhile.

    A stderr that is no terminal stays as it is.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    numbers = [STDOUT, STDERR] if os.isatty(STDERR) else [STDOUT]
    before = {number: os.dup(number) for number in numbers}
    read_end, write_end = os.pipe()
    for number in numbers:
        os.dup2(write_end, number)
    os.close(write_end)
    with os.fdopen(os.dup(before[STDOUT]), "w") as terminal:
        try:
            yield terminal, CapturedLines(read_end)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in before.items():
                os.dup2(copy, number)
                os.close(copy)
            terminal.flush()
    os.close(read_end)


REFRESH_SECONDS = 0.2
DEFAULT_SIZE = (80, 24)


@contextmanager
def live_display(events_file: Path, what: str) -> Iterator[bool]:
    """Show the events that rank 0 appends to ``events_file``, and above them the output of all ranks, if stdout is a
    terminal; yield whether it is.

    ``what``: is done before the first event.
    """
    if not is_terminal():
        yield False
        return
    with captured_output() as (terminal, output):
        stop = threading.Event()
        arguments = (events_file, what, terminal, output, stop)
        thread = threading.Thread(target=_show, args=arguments, name="display", daemon=True)
        thread.start()
        try:
            yield True
        finally:
            stop.set()
            thread.join()


def _show(events_file: Path, what: str, terminal: TextIO, output: CapturedLines, stop: threading.Event) -> None:
    """Draw until ``stop``; whatever happens, ranks that print are not stopped by a pipe that nothing reads."""
    reader = EventReader(events_file)
    try:
        _draw(reader, what, terminal, output, stop)
    finally:
        reader.close()
        while not stop.is_set():
            terminal.writelines(f"{line}\n" for line in output.read(REFRESH_SECONDS))


def _draw(reader: EventReader, what: str, terminal: TextIO, output: CapturedLines, stop: threading.Event) -> None:
    """Draw until ``stop``, and then everything that has come until then."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from flexrlhf.display.live_view import LiveView

    console = Console(file=terminal, force_terminal=True, highlight=False)
    view = LiveView(what)
    # the last of it stays nowhere: the summary follows
    with Live(
        console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as live:
        is_last = False
        while not is_last:
            is_last = stop.is_set()
            console.size = _size(terminal)
            printed = output.rest() if is_last else output.read(REFRESH_SECONDS)
            # output about a step comes after its event
            lines = [line for event in reader.read() for line in view.lines(event, console.width)]
            lines += map(Text, printed)
            if lines:
                console.print(*lines, sep="\n", soft_wrap=True)
            live.update(view.panel(console.width), refresh=True)


def _size(terminal: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal; some that programs open have none."""
    columns, lines = os.get_terminal_size(terminal.fileno())
    return (columns, lines) if columns and lines else DEFAULT_SIZE
