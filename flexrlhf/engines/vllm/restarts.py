"""Restarts of the child process of a rollout engine on one rank: their number and its limit."""

from __future__ import annotations

import sys

from flexrlhf.api import RunStopped, counted


class RolloutProcessError(RunStopped):
    """The process of a rollout engine ended by itself, or did not start or respond."""


class Restarts:
    """Count of the children that ``rank`` has replaced, at most ``limit`` in one step (``rollout.max_restarts``)."""

    def __init__(self, limit: int, rank: int) -> None:
        self.limit, self._rank = limit, rank
        self._step: int | None = None
        self._num_in_step = 0

    def begin(self, step: int) -> None:
        """Begin with a call of ``step``; if it is another one than before, that one is finished."""
        if step != self._step:
            self._step, self._num_in_step = step, 0

    def add(self, error: RolloutProcessError) -> None:
        """Count a child that has failed, and print that it is replaced. Raises ``error`` beyond the limit."""
        if self._num_in_step == self.limit:
            before = counted(self.limit, "restart")
            after = f", after {before} in the same step (rollout.max_restarts)" if self.limit else ""
            raise RolloutProcessError(f"{error}{after}") from error
        self._num_in_step += 1
        weights = "" if self._step is None else " with the weights of the last sync"
        restart = f"restart {self._num_in_step} of {self.limit}{weights}"
        print(f"flexrlhf: rank {self._rank}: {error}; {restart}", file=sys.stderr, flush=True)
