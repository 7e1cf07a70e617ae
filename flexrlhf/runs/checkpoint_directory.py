"""Checkpoint of a run: a directory ``checkpoints/step-<next step>``.

It is filled under another name and renamed when every rank has written its files, so a directory of that name is whole,
unless a file was damaged afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.runs.durable_files import WRITING, FileEntry, file_checksum, sync_to_disk
from flexrlhf.runs.fingerprints import library_versions
from flexrlhf.runs.manifest import MANIFEST, Manifest, Progress

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class CheckpointDirectory:
    """A checkpoint by its directory."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def all_of(cls, run: Path) -> list[CheckpointDirectory]:
        """Return the checkpoints of the run in directory ``run``, the newest first."""
        folder = run / FOLDER
        if not folder.is_dir():
            return []
        steps = {int(match[1]): cls(path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps, reverse=True) if steps[step]._has_manifest]

    @classmethod
    def found_at(cls, place: Path) -> list[CheckpointDirectory]:
        """Return the checkpoint in ``place``, or the ones of the run in it."""
        own = cls(place)
        return [own] if own._has_manifest else cls.all_of(place)

    @classmethod
    def before(cls, run: Path, next_step: int) -> CheckpointDirectory:
        """Return the checkpoint before ``next_step`` of the run in ``run``, which need not be there."""
        return cls(run / FOLDER / f"step-{next_step:06d}")

    @property
    def _has_manifest(self) -> bool:
        return (self.path / MANIFEST).is_file()

    @cached_property
    def manifest(self) -> Manifest:
        """Contents of its manifest. Raises UserError if there is none, or one of another format."""
        return Manifest.read(self.path)

    def damage(self, name: str) -> str | None:
        """Return in words the damage of a file; None if size and checksum agree."""
        path, entry = self.path / name, self.manifest.files[name]
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry.num_bytes:
            return f"{name} has {size} of {entry.num_bytes} bytes"
        return None if file_checksum(path) == entry.sha256 else f"{name} has another checksum than when it was written"

    @property
    def unfinished(self) -> Path:
        """Directory in which its files are written."""
        return self.path.with_name(self.path.name + WRITING)

    def complete(
        self, spec: Spec, data: str, files: Mapping[str, FileEntry], progress: Progress, inputs: Mapping[str, str]
    ) -> None:
        """Write the manifest next to the files, and give the directory its name, on disk when this returns.

        data:    digest of the training examples.
        inputs:  digests of models and of a user's code.
        """
        fresh = self.unfinished
        Manifest(spec.dump(), data, library_versions(), files, progress, inputs).write(fresh)
        sync_to_disk(fresh)
        if self.path.exists():
            # of an attempt that went on from an earlier checkpoint
            shutil.rmtree(self.path)
        os.rename(fresh, self.path)
        sync_to_disk(self.path.parent)
