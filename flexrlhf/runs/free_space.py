"""Free space for the checkpoints and models that runs will write, before they start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flexrlhf.errors import UserError
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.checkpoint_directory import FOLDER
from flexrlhf.runs.resume import Resumption
from flexrlhf.text import bytes_text


@dataclass(frozen=True)
class DiskNeed:
    """Most bytes of a run on disk at a time.

    run:              its name
    directory:        of its results
    checkpoint:       bytes of one checkpoint
    num_checkpoints:  kept ones and the one that is written
    models:           bytes of saved models, and of the copy that replaces one
    on_signal:        whether only a signal writes a checkpoint
    """

    run: str
    directory: Path
    checkpoint: int
    num_checkpoints: int
    models: int
    on_signal: bool = False

    @classmethod
    def of(cls, plan: Plan) -> DiskNeed:
        """Return the bytes that the run of ``plan`` writes; a model of an architecture yet unknown counts nothing."""
        settings = plan.spec.checkpoint
        written = 0 if settings.every is None else -(-plan.spec.steps // settings.every)
        return cls(
            plan.spec.name,
            plan.spec.directory,
            plan.checkpoint_bytes,
            min(written, settings.keep_last + 1),
            _model_bytes(plan),
            on_signal=settings.on_signal and not written,
        )

    @property
    def total(self) -> int:
        """Bytes without a checkpoint that only a signal writes."""
        return self.num_checkpoints * self.checkpoint + self.models

    @property
    def with_signal(self) -> int:
        """Bytes with the checkpoint of a signal."""
        return self.total + (self.checkpoint if self.on_signal else 0)

    def __str__(self) -> str:
        text = f"{self.run} needs {bytes_text(self.total)}"
        if not self.num_checkpoints:
            return text
        many = "checkpoint" if self.num_checkpoints == 1 else "checkpoints"
        checkpoints = f"{self.num_checkpoints} {many} of {bytes_text(self.checkpoint)}"
        return f"{text} ({checkpoints}, models of {bytes_text(self.models)})"


def _model_bytes(plan: Plan) -> int:
    """Return the bytes of all saved models: a new copy exists before it replaces the one of an earlier step.

    With ``save.keep`` there is one for each time.
    """
    sizes = [plan.sizing.saved_bytes(plan.placement[role]) for role in plan.graph.trained if role in plan.shapes]
    settings = plan.spec.save
    times = -(-plan.spec.steps // settings.every) if settings.every is not None else 1
    replaces = settings.best is not None or (times > 1 and not settings.keep)
    kept = (times if settings.keep else 1) + (settings.best is not None)
    return sum(sizes) * kept + (max(sizes, default=0) if replaces else 0)


@dataclass(frozen=True)
class DiskDemand:
    """Runs that write to one file system.

    place:    the directory of one of them, or the nearest one above it that exists
    free:     bytes that this user may write
    needs:    of the runs
    written:  bytes of theirs that are there and will be replaced
    """

    place: Path
    free: int
    needs: tuple[DiskNeed, ...]
    written: int

    @classmethod
    def of(cls, runs: Sequence[Resumption]) -> list[DiskDemand]:
        """Return the demands of ``runs``, for each file system."""
        by_device: dict[int, DiskDemand] = {}
        for run in runs:
            place, need = present_directory(run.plan.spec.directory), DiskNeed.of(run.plan)
            written = min(need.total, sum(_written(run))) if run.continues else 0
            device, new = os.stat(place).st_dev, cls(place, shutil.disk_usage(place).free, (), 0)
            found = by_device.get(device, new)
            by_device[device] = replace(found, needs=(*found.needs, need), written=found.written + written)
        return list(by_device.values())

    @classmethod
    def check(cls, runs: Sequence[Resumption]) -> None:
        """Raise UserError if a file system lacks space for the checkpoints and models that ``runs`` will write."""
        for demand in cls.of(runs):
            if demand.missing:
                raise UserError(
                    f"runs: {demand.text}, {bytes_text(demand.missing)} too little; free space, set runs: to another "
                    f"directory, or reduce checkpoint.keep_last"
                )

    @property
    def missing(self) -> int:
        """Bytes that are not free; 0 if there is enough."""
        return max(0, sum(need.total for need in self.needs) - self.written - self.free)

    @property
    def missing_on_signal(self) -> int:
        """Bytes that are not free for the checkpoint of a signal, one run at a time."""
        extra = max(need.with_signal - need.total for need in self.needs)
        return max(0, sum(need.total for need in self.needs) + extra - self.written - self.free)

    @property
    def text(self) -> str:
        """Needs of the runs, and the free space."""
        return f"{', '.join(map(str, self.needs))}; {self.place} has {bytes_text(self.free)} free"


def present_directory(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if os.path.isdir(each))


def _written(run: Resumption) -> Iterator[int]:
    """Yield the bytes of checkpoints and models in the directory of a run that goes on there."""
    directory = run.plan.spec.directory
    for part in (FOLDER, *run.plan.graph.trained, *(f"{role}-best" for role in run.plan.graph.trained)):
        yield from (file.stat().st_size for file in (directory / part).rglob("*") if file.is_file())
