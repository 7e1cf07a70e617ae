"""Requests to save and end a run: a signal to the launcher or, under torchrun, to a rank.

All ranks must end after the same step without waiting for each other. At the end of a round of the list the first rank
that arrives decides for all of them, by whether a request has been seen by then.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import ClassVar

import torch.distributed as dist

from flexrlhf.signals import StopSignal

STOP, CONTINUE = "stop", "continue"


@dataclass
class StopRequests:
    """Requests that reach this rank, and the decisions of all ranks.

    store:     of the job.
    file:      exists once the launcher has received a signal; None under torchrun, which has no such file.
    """

    store: dist.Store
    file: Path | None = None
    _is_signalled: bool = field(default=False, init=False)

    END_NOW: ClassVar = "now"
    """Contents of the file once a second signal has come: the ranks end without saving."""
    REPLAN: ClassVar = "replan"
    """Contents of the file after which the launcher goes on under another placement."""

    def install_handlers(self) -> None:
        """Take signals to this process as requests."""
        for number in StopSignal.SAVING:
            signal.signal(number, self._on_signal)

    def decide(self, moment: str) -> bool:
        """Return whether the job ends at ``moment``; the same on all ranks, whenever they come there."""
        choice = STOP if self.is_requested() else CONTINUE
        decided: bytes = self.store.compare_set(f"decision/{moment}", "", choice)
        return decided.decode() == STOP

    def follow(self, moment: str, timeout_seconds: float) -> bool:
        """Return the decision for ``moment`` of the ranks that have work, to a rank that has none."""
        key = f"decision/{moment}"
        self.store.wait([key], timedelta(seconds=timeout_seconds))
        return self.store.get(key).decode() == STOP

    def is_requested(self) -> bool:
        """Return whether a request has reached any rank."""
        if self._is_signalled or (self.file is not None and self.file.exists()):
            self.store.set("request", STOP)
            return True
        return bool(self.store.check(["request"]))

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self._is_signalled = True
