"""Measured memory of a rank: on a GPU the bytes that torch has allocated, on a CPU the process's resident set (RSS)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from flexrlhf.errors import RunStopped, is_exhaustion
from flexrlhf.memory.states import State, reused_bytes
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Offload, Reload
from flexrlhf.text import bytes_text, counted
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.loaded_models import LoadedModel

ModelsOnRank = Mapping[ModelName, LoadedModel]
ReportMemory = Callable[[str, ModelsOnRank], None]
_ALLOCATOR_SETTINGS, _EXPANDABLE = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryMeter:
    """A meter of bytes above those at its making, before the first run of a command.

    start:        bytes when the meter was made
    most_in_use:  the most of a GPU that its driver has counted since ``reset_peak``, whenever it was asked
    """

    def __init__(self, device: torch.device) -> None:
        """Start at the bytes that are allocated now on ``device``, of this rank."""
        self._device = device
        self._highest = self._unmapped = self.most_in_use = 0
        self.start = self._read("VmRSS", torch.accelerator.memory_allocated)

    def reset_peak(self) -> None:
        """Start a new peak: loading a model takes more memory than it does afterwards."""
        self._highest = self.most_in_use = 0
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

    def in_use(self) -> tuple[int, int] | None:
        """Return the bytes of a GPU that its driver counts as in use, and all that it has; None on a CPU.

        In use by all processes: also communicators, captured graphs, libraries, and memory that torch keeps.
        """
        if self._device.type == "cpu":
            return None
        free, total = torch.accelerator.get_memory_info(self._device)
        self.most_in_use = max(self.most_in_use, total - free)
        return total - free, total

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
    """Peak of this rank's memory, by instruction.

    report:  receives a moment for which memory in use is compared with the planned one, and the models.
    """

    def __init__(self, meter: MemoryMeter, models: ModelsOnRank, report: ReportMemory) -> None:
        self._meter, self._models, self._report = meter, models, report
        self._asleep: set[ModelName] = set()

    def end(self, execution: Execution) -> None:
        """Add the peak to the span of the instruction."""
        instruction = execution.instruction
        execution.span.peak_bytes = self._meter.lap()
        self._meter.in_use()
        if isinstance(instruction, Offload | Reload):
            self._meter.leave_out(sum(each.engine.memory_usage().unmapped for each in self._models.values()))
            name = instruction.model
            if isinstance(instruction, Offload) and self._models[name].placed.has_cache and name not in self._asleep:
                self._asleep.add(name)
                self._report(f"{name} sleeps", self._models)


def connected_memory(plan: Plan, rank: int, used: int, total: int) -> str:
    """Return the bytes in use on a GPU once ranks are connected, before models are loaded, next to the planned ones."""
    made = f"rank {rank}: {counted(plan.communicators_of_groups(rank), 'communicator')}"
    return _in_use(made, used, total, plan.outside_bytes(rank, only_of_groups=True))


def memory_in_use(plan: Plan, rank: int, moment: str, loaded: Mapping[ModelName, bool], used: int, total: int) -> str:
    """Return the bytes in use on a GPU at a ``moment`` between instructions, next to the planned ones.

    loaded:  models that are loaded, and whether they are on the device.
    """
    states = {name: plan.state(plan.placement[name], rank) or State(0) for name in loaded}
    absent = {name for name, is_here in loaded.items() if not is_here}
    resting = sum(state.resting - state.freed if name in absent else state.loaded for name, state in states.items())
    planned = plan.outside_bytes(rank) + resting + reused_bytes(states, absent)
    return _in_use(f"rank {rank}: {moment}", used, total, planned)


def _in_use(moment: str, used: int, total: int, planned: int) -> str:
    return f"{moment}; {bytes_text(used)} of {bytes_text(total)} in use, planned {bytes_text(planned)}"


def use_expandable_segments() -> None:
    """Let torch's memory of GPUs grow in place from now on, unless the environment says whether it does.

    vLLM suspends it while it allocates memory that sleeps.
    """
    settings = next((os.environ[name] for name in _ALLOCATOR_SETTINGS if os.environ.get(name)), "")
    if _EXPANDABLE not in settings:
        # torch resets all settings that are not in the text
        torch._C._accelerator_setAllocatorSettings(f"{settings},{_EXPANDABLE}:True".lstrip(","))


@contextmanager
def naming_exhaustion(where: str) -> Iterator[None]:
    """Raise RunStopped if memory is exhausted inside. ``where``: what was being done, for the sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_exhaustion(error):
            raise
        text = str(error).partition("\n")[0]
        gaps = "; if much is reserved but not allocated, debug.expandable_segments: true"
        raise RunStopped(
            f"{where}: memory is exhausted ({text or 'MemoryError'}); use fewer micro_batch_tokens or generate_tokens, "
            f"or what flexrlhf plan lists as freeing memory{gaps * isinstance(error, torch.OutOfMemoryError)}"
        ) from None
