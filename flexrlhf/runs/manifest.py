"""Manifest of a checkpoint: its files with sizes and checksums, and the numbers that the next step depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError
from flexrlhf.runs.durable_files import FileEntry, write_durably

MANIFEST = "manifest.json"
FORMAT = 1


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
    calls:        step in flight → messages of the calls of a program that have written its columns
    begun:        step in flight → operator that has run on some of its mini-batches → its sums for its controller
    prompts:      step whose rows are in flight or carried → examples that a program has given it
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
    calls: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    prompts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    begun: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def first_generated(self, spec: Spec) -> int:
        """Return the first step that is not generated yet. ``spec``: of the run that wrote the checkpoint."""
        if self.generated is not None:
            return self.generated
        return min(self.next_step + spec.schedule.lag, spec.steps)


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
        return Spec.parse(read_yaml(self.spec), "settings of the run that wrote the checkpoint")

    def write(self, directory: Path) -> None:
        """Write ``manifest.json`` into ``directory``, on disk when this returns."""
        contents = asdict(self)
        text = json.dumps({"format": FORMAT, "sha256": _digest(contents), "contents": contents}, indent=1)
        write_durably(directory / MANIFEST, text.encode())

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint. Raises UserError if there is none, or one of another format."""
        path = directory / MANIFEST
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise UserError(f"checkpoint {directory}: no {MANIFEST} in it; give a directory step-<number>") from None
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"checkpoint {directory}: {MANIFEST} cannot be read ({reason})") from None
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else None
            raise UserError(f"checkpoint {directory}: its format is {found}, and this version reads {FORMAT}")
        contents: Any = raw.get("contents") or {}
        if _digest(contents) != raw.get("sha256"):
            raise UserError(f"checkpoint {directory}: {MANIFEST} has another checksum than when it was written")
        files = {name: FileEntry(**entry) for name, entry in contents["files"].items()}
        return cls(**{**contents, "files": files, "progress": Progress(**contents["progress"])})


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
