"""Manifest of a checkpoint: its files with sizes and checksums, and the numbers that the next step depends on.

A checkpoint is a directory ``checkpoints/step-<next step>`` of a run. It is filled under another name and renamed when
every rank has written its files, so a directory of that name is whole, unless a file was damaged afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import parse_spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file of a checkpoint.

    num_bytes:  its size
    sha256:     hexadecimal digest of its contents
    """

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Progress:
    """Numbers that the next step depends on, in addition to tensors.

    next_step:    the first step that is not trained on yet
    generated:    the first step that is not generated yet; None: of an older version
    numbers:      role → numbers of its training state (updates made, loss scale)
    versions:     placed model → weights version
    controllers:  operator → state of its controller
    best:         model → best metric of the evaluations so far
    reports:      step in flight → operator → its report, for the metrics and samples of that step
    rows:         outcome → rows that were taken from the data; empty: of an older version
    carried:      step → rows of the prompts that it took which are carried to the next step
    """

    next_step: int
    numbers: Mapping[str, Mapping[str, float]]
    versions: Mapping[str, int]
    controllers: Mapping[str, Mapping[str, float]]
    best: Mapping[str, float]
    reports: Mapping[str, Mapping[str, Any]]
    rows: Mapping[str, int] = field(default_factory=dict)
    carried: Mapping[str, list[int]] = field(default_factory=dict)
    generated: int | None = None


def first_generated(progress: Progress, spec: Spec) -> int:
    """Return the first step that is not generated yet. ``spec``: of the run that wrote the checkpoint."""
    if progress.generated is not None:
        return progress.generated
    return min(progress.next_step + spec.schedule.lag, spec.steps)


@dataclass(frozen=True)
class Manifest:
    """Contents of ``manifest.json``.

    spec:      resolved YAML of the run
    data:      digest of the training examples
    libraries: versions of the packages that wrote it
    files:     by name
    progress:  numbers of the run
    inputs:    digest of each file of models and of a user's code, by its setting and name; None: of an older version
    """

    spec: str
    data: str
    libraries: Mapping[str, str]
    files: Mapping[str, FileEntry]
    progress: Progress
    inputs: Mapping[str, str] | None = None

    @cached_property
    def settings(self) -> Spec:
        """Settings of the run. Raises UserError for some that this version does not have."""
        return parse_spec(read_yaml(self.spec), "settings of the run that wrote the checkpoint")


def checkpoint_directory(run: Path, next_step: int) -> Path:
    """Return the directory of the checkpoint before ``next_step`` of the run in ``run``."""
    return run / FOLDER / f"step-{next_step:06d}"


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints of the run in directory ``run``, the newest first."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    steps = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps, reverse=True) if (steps[step] / MANIFEST).is_file()]


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into ``directory``, on disk when this returns."""
    contents = asdict(manifest)
    text = json.dumps({"format": FORMAT, "sha256": _digest(contents), "contents": contents}, indent=1)
    write_durably(directory / MANIFEST, text.encode())


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises UserError if there is none, or one of another format."""
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"checkpoint {directory}: no {MANIFEST} in it; give a directory step-<number>") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint {directory}: {MANIFEST} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise UserError(f"checkpoint {directory}: its format is {found}, and this version reads {FORMAT}")
    contents: Any = raw.get("contents") or {}
    if _digest(contents) != raw.get("sha256"):
        raise UserError(f"checkpoint {directory}: {MANIFEST} has another checksum than when it was written")
    files = {name: FileEntry(**entry) for name, entry in contents["files"].items()}
    return Manifest(**{**contents, "files": files, "progress": Progress(**contents["progress"])})


def damage(directory: Path, name: str, entry: FileEntry) -> str | None:
    """Return in words the damage of a file of a checkpoint; None if size and checksum agree."""
    path = directory / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != entry.num_bytes:
        return f"{name} has {size} of {entry.num_bytes} bytes"
    return None if file_checksum(path) == entry.sha256 else f"{name} has another checksum than when it was written"


def file_checksum(path: Path) -> str:
    """Return the sha256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, contents: bytes) -> FileEntry:
    """Write a file that is on disk when this returns. Returns its size and checksum."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(contents), hashlib.sha256(contents).hexdigest())


def sync_to_disk(path: Path) -> None:
    """Put a file on disk, or the names in a directory, such as a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
