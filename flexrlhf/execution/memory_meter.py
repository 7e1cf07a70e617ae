"""Memory that a rank really takes: on a GPU what torch has allocated, on a CPU the resident set of the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class MemoryMeter:
    """Bytes above ``start``: what the process held when the meter was made, before the first run of a command."""

    device: torch.device
    start: int = 0

    def __post_init__(self) -> None:
        self.start = self._read("VmRSS", torch.cuda.memory_allocated)

    def forget_peak(self) -> None:
        """Count the peak from here on: loading a model takes more than keeping it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif _CLEAR.exists():
            # 5 resets the peak resident set (proc(5)); some sandboxes forbid it, and then loading counts too
            try:
                _CLEAR.write_text("5")
            except OSError:
                return

    def now(self) -> int:
        return self._read("VmRSS", torch.cuda.memory_allocated) - self.start

    def peak(self) -> int:
        """The most since ``forget_peak``."""
        return self._read("VmHWM", torch.cuda.max_memory_allocated) - self.start

    def _read(self, name: str, on_gpu: Callable[[], int]) -> int:
        if self.device.type == "cuda":
            return on_gpu()
        if not _STATUS.exists():
            return 0
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
