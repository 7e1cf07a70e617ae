"""Limits on the sources of one section: their time for one step, since other ranks wait for them, and warnings."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, Self

from flexrlhf.errors import one_line
from flexrlhf.rewards.base import Reply, Sample, Score, ScoreFailure

MAX_TIMEOUTS = 3
"""Timeouts in a row, of one source in one step, after which no further batch is sent: it would hang, too."""
TIMEOUTS = frozenset({"timeout", "deadline"})
"""Kinds of failures that count as timeouts."""


@dataclass(frozen=True)
class Deadline:
    """The end of the time for one step's scores.

    seconds:  the time from its start
    end:      as ``time.monotonic`` counts
    work:     name of what is late afterwards
    """

    seconds: float
    end: float
    work: str = "scores"

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the deadline ``seconds`` from now."""
        return cls(seconds, time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds until the deadline; negative afterwards."""
        return self.end - time.monotonic()

    def failure(self) -> ScoreFailure:
        """The failure of a batch that has no reply by the deadline."""
        return ScoreFailure("late", f"not all {self.work} within {self.seconds:g} s, half of the run's timeout_seconds")


class ScoreSource(Protocol):
    """One source of scores. ``score`` returns one score a sample, a few seconds after the deadline at the latest."""

    def score(self, samples: Sequence[Sample], deadline: Deadline) -> list[Score]: ...

    def close(self) -> None: ...


class CircuitBreaker:
    """Stops sending batches to one source for the rest of a step: at the deadline, or after MAX_TIMEOUTS in a row.

    Several threads may use it.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._timeouts = 0
        self._lock = Lock()

    def failure(self) -> ScoreFailure | None:
        """Return why no further batch is to be sent; None while batches are sent."""
        if self._deadline.left() <= 0:
            return self._deadline.failure()
        if self._timeouts >= MAX_TIMEOUTS:
            text = f"{MAX_TIMEOUTS} timeouts in a row; the step's other batches are not sent"
            return ScoreFailure("circuit breaker", text)
        return None

    def record(self, reply: Reply) -> None:
        """Count the timeouts in a row. Once there are MAX_TIMEOUTS it stays so."""
        with self._lock:
            if self._timeouts < MAX_TIMEOUTS:
                is_timeout = reply.failure is not None and reply.failure.kind in TIMEOUTS
                self._timeouts = self._timeouts + 1 if is_timeout else 0


class WarnOnce:
    """Writer of one line for each kind of failure of a source. Several threads may use it.

    ``name``: the source as the YAML has it, such as ``reward.url``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: set[str] = set()
        self._lock = Lock()

    def __call__(self, failure: ScoreFailure | None) -> None:
        """Write one line to stderr, unless there was one of this kind."""
        if failure is None:
            return
        with self._lock:
            is_first = failure.kind not in self._kinds
            self._kinds.add(failure.kind)
        if is_first:
            text = one_line(failure.text)
            print(f"flexrlhf: {self._name}: {text}; further ones are only counted", file=sys.stderr)
