"""Output of this process and of those it starts, captured while a terminal shows a display.

A display moves the cursor over lines that it draws again. What ranks and libraries print would land in the middle of
it, so their stdout and stderr are a pipe, whose lines are printed above the display.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

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
        """Return what has come in the meantime, and the last line also if it has no end."""
        lines: list[str] = []
        while found := self.read(0.0):
            lines += found
        return lines + ([_shown(self._rest)] if self._rest else [])


def _shown(line: bytes) -> str:
    """Return a line as a terminal would show it in the end: what is behind the last carriage return."""
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
