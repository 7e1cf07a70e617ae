"""Measured memory of a rank: on a GPU the bytes that torch has allocated, on a CPU the process's resident set (RSS)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class MemoryMeter:
    """A meter of bytes above those at its making, before the first run of a command.

    device:  device of this rank
    start:   bytes when the meter was made
    """

    device: torch.device
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self._read("VmRSS", torch.cuda.memory_allocated)

    def reset_peak(self) -> None:
        """Start a new peak: loading a model takes more memory than it does afterwards."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif _CLEAR.exists():
            # 5 resets the peak resident set (proc(5)); some sandboxes forbid it, and then loading counts
            try:
                _CLEAR.write_text("5")
            except OSError:
                return

    def now(self) -> int:
        """Return the bytes at this moment."""
        return self._read("VmRSS", torch.cuda.memory_allocated) - self.start

    def peak(self) -> int:
        """Return the maximum since ``reset_peak``."""
        return self._read("VmHWM", torch.cuda.max_memory_allocated) - self.start

    def _read(self, name: str, on_gpu: Callable[[], int]) -> int:
        if self.device.type == "cuda":
            return on_gpu()
        if not _STATUS.exists():
            return 0
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
