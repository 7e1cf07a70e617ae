"""Time that is left, and commands that may not outlast it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Unfinished(Exception):
    """A command that has not done all. ``printed``: by it until then."""

    def __init__(self, sentence: str, printed: str) -> None:
        super().__init__(sentence)
        self.printed = printed


class OutOfTime(Unfinished):
    """The time given to a command has passed; it was ended."""


class Failed(Unfinished):
    """A command ended with an error, whose last line is the text of this."""


@dataclass(frozen=True)
class TimeBudget:
    """Time budget of a stage.

    seconds:      from the making of this
    environment:  variables of all commands
    """

    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    _start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self._start)

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None, most: float = 1e9) -> str:
        """Run a command within the remaining time, at most ``most`` seconds; return its output.

        Raises OutOfTime, after which no process of it is left, and Failed.
        """
        process = subprocess.Popen(
            command,
            env={**os.environ, **self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit = max(1.0, min(self.left, most))
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise OutOfTime(f"not done after {limit:.0f} s", _end(process)) from None
        if process.returncode:
            last = (printed.strip().splitlines() or ["no output"])[-1]
            raise Failed(f"{last} (exit status {process.returncode})", printed)
        return printed


def _end(process: subprocess.Popen[str]) -> str:
    """End a command and its ranks by SIGTERM, after 15 s by SIGKILL; return its output."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=15)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]
