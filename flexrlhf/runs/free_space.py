"""Free space for what runs will write, before they start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexrlhf.errors import UserError
from flexrlhf.plan.disk_space import DiskNeed, planned_disk
from flexrlhf.runs.manifest import FOLDER
from flexrlhf.runs.resume import Resumption
from flexrlhf.text import bytes_text


@dataclass(frozen=True)
class DiskSpace:
    """File system of a directory.

    place:   the directory, or the nearest one above it that exists
    device:  number of the file system
    free:    bytes that this user may write
    """

    place: Path
    device: int
    free: int


@dataclass(frozen=True)
class DiskDemand:
    """Runs that write to one file system.

    space:    of it
    needs:    of the runs
    written:  bytes of theirs that are there and will be replaced
    """

    space: DiskSpace
    needs: tuple[DiskNeed, ...]
    written: int

    @property
    def missing(self) -> int:
        """Bytes that are not free; 0 where there is enough."""
        return max(0, sum(need.total for need in self.needs) - self.written - self.space.free)

    @property
    def missing_on_signal(self) -> int:
        """Bytes that are not free for what a signal writes, one run at a time."""
        extra = max(need.with_signal - need.total for need in self.needs)
        return max(0, sum(need.total for need in self.needs) + extra - self.written - self.space.free)

    @property
    def text(self) -> str:
        """Needs of the runs, and the free space."""
        return f"{', '.join(map(str, self.needs))}; {self.space.place} has {bytes_text(self.space.free)} free"


def disk_space(path: Path) -> DiskSpace:
    """Return the file system on which ``path`` is, or would be made."""
    place = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.isdir(each))
    return DiskSpace(place, os.stat(place).st_dev, shutil.disk_usage(place).free)


def disk_demands(runs: Sequence[Resumption]) -> list[DiskDemand]:
    """Return what ``runs`` need, for each file system."""
    by_device: dict[int, list[tuple[DiskSpace, DiskNeed, int]]] = {}
    for run in runs:
        space, need = disk_space(run.plan.spec.directory), planned_disk(run.plan)
        written = min(need.total, sum(_written(run))) if run.continues else 0
        by_device.setdefault(space.device, []).append((space, need, written))
    return [
        DiskDemand(members[0][0], tuple(need for _, need, _ in members), sum(written for *_, written in members))
        for members in by_device.values()
    ]


def check_free_space(runs: Sequence[Resumption]) -> None:
    """Raise UserError where a file system lacks space for the checkpoints and models that ``runs`` will write."""
    for demand in disk_demands(runs):
        if demand.missing:
            raise UserError(
                f"runs: {demand.text}, {bytes_text(demand.missing)} too little; free space, set runs: to another "
                f"directory, or reduce checkpoint.keep_last"
            )


def _written(run: Resumption) -> Iterator[int]:
    """Yield the bytes of checkpoints and models in the directory of a run that goes on there."""
    directory = run.plan.spec.directory
    for part in (FOLDER, *run.plan.graph.trained, *(f"{role}-best" for role in run.plan.graph.trained)):
        yield from (file.stat().st_size for file in (directory / part).rglob("*") if file.is_file())
