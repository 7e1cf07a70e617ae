"""Time that calls of one step have together, since other ranks wait for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from flexrlhf.user_code.call_failures import CallFailure


@dataclass(frozen=True)
class Deadline:
    """The end of the time for the calls of one step.

    seconds:  the time from its start
    end:      as ``time.monotonic`` counts
    work:     name of what is late afterwards
    """

    seconds: float
    end: float
    work: str

    @classmethod
    def after(cls, seconds: float, work: str = "scores") -> Self:
        """Return the deadline ``seconds`` from now of ``work``."""
        return cls(seconds, time.monotonic() + seconds, work)

    def left(self) -> float:
        """Seconds until the deadline; negative afterwards."""
        return self.end - time.monotonic()

    def failure(self) -> CallFailure:
        """The failure of a batch that has no reply by the deadline."""
        return CallFailure("late", f"not all {self.work} within {self.seconds:g} s, half of the run's timeout_seconds")
