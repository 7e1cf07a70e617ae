"""Display of the runs of a command on a terminal, in the process that starts the ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from flexrlhf.display.captured import CapturedLines, captured_output
from flexrlhf.display.events import EventReader

REFRESH_SECONDS = 0.2
DEFAULT_SIZE = (80, 24)


@contextmanager
def live_display(events_file: Path, what: str) -> Iterator[None]:
    """Show the events that rank 0 appends to ``events_file``, and above them what all ranks print.

    ``what``: is done before the first event.
    """
    with captured_output() as (terminal, output):
        stop = threading.Event()
        arguments = (events_file, what, terminal, output, stop)
        thread = threading.Thread(target=_show, args=arguments, name="display", daemon=True)
        thread.start()
        try:
            yield
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
    """Draw until ``stop``, and then what has come until then."""
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
            # what is printed about a step comes after its event
            lines = [line for event in reader.read() for line in view.lines(event, console.width)]
            lines += map(Text, printed)
            if lines:
                console.print(*lines, sep="\n", soft_wrap=True)
            live.update(view.panel(console.width), refresh=True)


def _size(terminal: TextIO) -> tuple[int, int]:
    """Return columns and lines of the terminal; some that programs open have none."""
    columns, lines = os.get_terminal_size(terminal.fileno())
    return (columns, lines) if columns and lines else DEFAULT_SIZE
