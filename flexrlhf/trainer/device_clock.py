"""Clock of a rank on a GPU, whose work is queued: an instant is when the device has come to it, by its events."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from flexrlhf.timeline import Clock, Instant


@dataclass
class _Reached:
    """The last instant whose time is known: an event and its seconds since the epoch."""

    event: Any
    seconds: float


class _DeviceInstant:
    """An event behind the work that is queued on the current stream. Its time is between its queueing and its reading.

    So no error of adding up differences of events, and none between the two clocks, grows with the run.
    """

    def __init__(self, last: _Reached) -> None:
        self.host = time.time()
        self._last = last
        self._event: Any = torch.Event(last.event.device, enable_timing=True)
        self._event.record()

    def is_reached(self) -> bool:
        """Return whether the device has done the work before it."""
        return bool(self._event.query())

    def seconds(self) -> float:
        """Wait for the device; return when it came here, in seconds since the epoch."""
        self._event.synchronize()
        last = self._last
        after = last.seconds + last.event.elapsed_time(self._event) / 1000
        found = min(max(after, self.host), time.time())
        last.event, last.seconds = self._event, found
        return found


class DeviceClock:
    """Instants on the current stream of the device of this rank."""

    def __init__(self, device: torch.device) -> None:
        """Wait for the device, so that both clocks begin together."""
        torch.accelerator.synchronize(device)
        start: Any = torch.Event(device, enable_timing=True)
        start.record()
        start.synchronize()
        self._last = _Reached(start, time.time())

    def now(self) -> Instant:
        """Return the instant behind what is queued now."""
        return _DeviceInstant(self._last)


def clock_of(device: torch.device) -> Clock | None:
    """Return the clock of a rank on ``device``; None: the host's, on which a CPU's work is done when a call returns."""
    return None if device.type == "cpu" else DeviceClock(device)
