"""Measured memory of a rank: on a GPU the bytes that torch has allocated, on a CPU the process's resident set (RSS)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from flexrlhf.errors import RunStopped, is_exhaustion
from flexrlhf.placement.placed import ModelName
from flexrlhf.strategies.instructions import Offload, Reload
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.loaded_models import LoadedModel

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryMeter:
    """A meter of bytes above those at its making, before the first run of a command.

    start:  bytes when the meter was made
    """

    def __init__(self, device: torch.device) -> None:
        """Start at the bytes that are allocated now on ``device``, of this rank."""
        self._device = device
        self._highest = self._unmapped = 0
        self.start = self._read("VmRSS", torch.accelerator.memory_allocated)

    def reset_peak(self) -> None:
        """Start a new peak: loading a model takes more memory than it does afterwards."""
        self._highest = 0
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        elif _CLEAR.exists():
            # 5 resets the peak resident set (proc(5)); some sandboxes forbid it, and then loading counts
            try:
                _CLEAR.write_text("5")
            except OSError:
                return

    def now(self) -> int:
        """Return the bytes at this moment."""
        return self._read("VmRSS", torch.accelerator.memory_allocated) - self._unmapped - self.start

    def peak(self) -> int:
        """Return the maximum since ``reset_peak``."""
        return max(self._highest, self._peak_of_lap())

    def lap(self) -> int | None:
        """Return the maximum since the last call, on a GPU: a resident set is too coarse for one instruction."""
        if self._device.type == "cpu":
            return None
        found = self._peak_of_lap()
        self._highest = max(self._highest, found)
        torch.accelerator.reset_peak_memory_stats(self._device)
        return found

    def leave_out(self, unmapped: int) -> None:
        """Count from now on without bytes that torch counts though a sleeping engine has returned them."""
        if unmapped != self._unmapped:
            self.lap()
            self._unmapped = unmapped

    def _peak_of_lap(self) -> int:
        return self._read("VmHWM", torch.accelerator.max_memory_allocated) - self._unmapped - self.start

    def _read(self, name: str, on_gpu: Callable[[torch.device], int]) -> int:
        if self._device.type != "cpu":
            return on_gpu(self._device)
        if not _STATUS.exists():
            return 0
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024


class PeakMemory(Observer):
    """Peak of this rank's memory, by instruction."""

    def __init__(self, meter: MemoryMeter, models: Mapping[ModelName, LoadedModel]) -> None:
        self._meter, self._models = meter, models

    def end(self, execution: Execution) -> None:
        """Add the peak to the span of the instruction."""
        execution.span.peak_bytes = self._meter.lap()
        if isinstance(execution.instruction, Offload | Reload):
            self._meter.leave_out(sum(each.engine.memory_usage().unmapped for each in self._models.values()))


@contextmanager
def naming_exhaustion(where: str) -> Iterator[None]:
    """Raise RunStopped if memory is exhausted inside. ``where``: what was being done, for the sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_exhaustion(error):
            raise
        text = str(error).partition("\n")[0]
        raise RunStopped(
            f"{where}: memory is exhausted ({text or 'MemoryError'}); use fewer micro_batch_tokens or generate_tokens, "
            f"or what flexrlhf plan lists as freeing memory"
        ) from None
