"""Sources of scores, and the limit on the timeouts of one in a step."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

from flexrlhf.rewards.base import Reply, Sample, Score
from flexrlhf.user_code.call_failures import CallFailure
from flexrlhf.user_code.deadline import Deadline

MAX_TIMEOUTS = 3
"""Timeouts in a row, of one source in one step, after which no further batch is sent: it would hang, too."""
TIMEOUTS = frozenset({"timeout", "deadline"})
"""Kinds of failures that count as timeouts."""


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

    def failure(self) -> CallFailure | None:
        """Return why no further batch is to be sent; None while batches are sent."""
        if self._deadline.left() <= 0:
            return self._deadline.failure()
        if self._timeouts >= MAX_TIMEOUTS:
            text = f"{MAX_TIMEOUTS} timeouts in a row; the step's other batches are not sent"
            return CallFailure("circuit breaker", text)
        return None

    def record(self, reply: Reply) -> None:
        """Count the timeouts in a row. Once there are MAX_TIMEOUTS it stays so."""
        with self._lock:
            if self._timeouts < MAX_TIMEOUTS:
                is_timeout = reply.failure is not None and reply.failure.kind in TIMEOUTS
                self._timeouts = self._timeouts + 1 if is_timeout else 0
