"""Files that a run with ``debug.record_columns`` has left: columns, statistics and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from flexrlhf.metrics import Triple
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.recorded_columns import (
    DIRECTORY,
    STATISTICS,
    Arrival,
    RecordedColumn,
    read_arrivals,
    read_columns,
)
from flexrlhf.runs.run_directory import read_lines


@dataclass(frozen=True)
class RecordedRun:
    """A finished run.

    plan:  the plan that it executed
    """

    plan: Plan

    @property
    def name(self) -> str:
        return self.plan.spec.name

    @property
    def directory(self) -> Path:
        return self.plan.spec.directory

    def columns(self, step: int) -> dict[str, RecordedColumn]:
        """Return the columns of ``step`` by name."""
        return read_columns(self.directory, step)

    def arrivals(self, step: int) -> list[Arrival]:
        """Return what operators of ``step`` read after moves."""
        return list(read_arrivals(self.directory, step))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of ``metrics.jsonl``."""
        return read_lines(self.directory / "metrics.jsonl")

    def statistics(self, step: int) -> dict[str, Triple]:
        """Return weight, sum and sum of squares of each statistic of ``step``."""
        return {name: tuple(triple) for name, triple in self._statistics[step]["statistics"].items()}

    def reporters(self, step: int) -> dict[str, str]:
        """Return who reported each statistic of ``step``, in words, in the order of the schedule."""
        reporters: dict[str, str] = self._statistics[step]["reporters"]
        return reporters

    @cached_property
    def _statistics(self) -> dict[int, dict[str, Any]]:
        """Statistics by step; a run that went on from a checkpoint may have repeated some."""
        return {row["step"]: row for row in read_lines(self.directory / DIRECTORY / STATISTICS)}

    def weights(self, role: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights of ``role`` after the last step, by name, one tensor in memory at a time."""
        for file in sorted((self.directory / role).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in sorted(tensors.keys()):
                    yield name, tensors.get_tensor(name)
