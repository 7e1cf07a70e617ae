"""The directory of a run, ``runs/<name>/``: resolved YAML, plan, status, metrics, samples, timeline and models."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.manifest import FOLDER, checkpoints_of

STATUS, METRICS = "status.json", "metrics.jsonl"
LOCK = ".lock"
ABANDONED = ".abandoned"
"""Ends the name of a checkpoint that is newer than the one that a run went on from, or damaged, until the run has
written one as new."""

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of writing, which have no path where the file was open before."""


_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run, in its directory.

    state:          ``running`` also if it was killed; ``stopped`` by a signal, with a checkpoint, or
                    at once
    next_step:      the first step that is not trained on
    steps:          steps of the whole run
    start_seconds:  time from the start of its ranks to its first instruction; None: of an older version, or not there
                    yet
    """

    state: Literal["running", "stopped", "finished"]
    next_step: int
    steps: int
    start_seconds: float | None = None


def write_status(directory: Path, status: RunStatus) -> None:
    """Write ``status.json``, never in part."""
    fresh = directory / f"{STATUS}.writing"
    fresh.write_text(json.dumps(asdict(status)) + "\n")
    fresh.replace(directory / STATUS)


def read_status(directory: Path) -> RunStatus | None:
    """Return the status of the run in ``directory``; None if there is none."""
    path = directory / STATUS
    if not os.path.isfile(path):
        # of a name that is too long, too
        return None
    try:
        return TypeAdapter(RunStatus).validate_json(path.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{path}: damaged; remove it") from None


def prepare_directory(plan: Plan, plan_text: str, continues: bool) -> IO[str]:
    """Make the run's directory with config and plan. Returns its lock, which is released when that is closed.

    An existing one is renamed to ``<name>.1``, ``<name>.2`` …, which is printed, unless the run ``continues`` there.
    Models and checkpoints in it that were not written to their end are removed.
    Raises UserError for a directory that a running process uses, or that cannot be written.
    """
    directory = plan.spec.directory
    try:
        if directory.exists():
            lock_directory(directory).close()
            for left in (*directory.glob("*.writing/"), *(directory / FOLDER).glob("*.writing/")):
                shutil.rmtree(left)
            if not continues:
                if (sentence := moved_run(directory)) is not None:
                    print(f"flexrlhf: {sentence}", file=sys.stderr)
                directory.rename(_free_name(directory))
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_directory(directory)
        (directory / "config.yaml").write_text(dump_spec(plan.spec))
        (directory / "plan.txt").write_text(plan_text + "\n")
        if not continues:
            write_status(directory, RunStatus("running", 0, plan.spec.steps))
    except OSError as error:
        reason = f"{directory} cannot be written ({error.strerror})"
        raise UserError(f"runs: {reason}; set runs: to another directory") from None
    return lock


def moved_run(directory: Path) -> str | None:
    """Return a sentence about an earlier run in ``directory``, which is about to be renamed; None without one."""
    status = read_status(directory)
    if status is None:
        return None
    if status.state == "finished":
        return f"{directory}: an earlier run is moved to {_free_name(directory)}"
    found = checkpoints_of(directory)
    hint = f"; --resume auto would go on from {found[0]}" if found else ""
    return f"{directory}: an earlier run has not finished and is moved to {_free_name(directory)}{hint}"


def lock_directory(directory: Path) -> IO[str]:
    """Lock the directory of a run for this process. Raises UserError if another process has locked it."""
    file = (directory / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UserError(f"{directory}: {owner} is using it; wait for its end, or give this run another name") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


@contextmanager
def writing_to(directory: Path) -> Iterator[None]:
    """Raise RunStopped if the body cannot write its files in ``directory``: full, read-only or removed meanwhile."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        is_inside = path is not None and path.absolute().is_relative_to(directory.absolute())
        if not is_inside and error.errno not in _FULL_OR_READ_ONLY:
            raise
        where = path if is_inside else directory
        raise RunStopped(f"{where}: cannot be written ({error.strerror or error})") from None


class RowWriter:
    """A jsonl file of a run that this process alone appends to.

    It stays open: if it is removed or replaced meanwhile, the rows so far are written again, and another file in its
    place gets another name. Rows that are cut off are lost. All of that is printed.
    """

    def __init__(self, path: Path) -> None:
        """Create nothing yet: the first row does."""
        self._path = path
        self._descriptor: int | None = None
        self._size = 0

    def append(self, text: str) -> None:
        """Write ``text`` at its end."""
        if self._descriptor is None:
            self._descriptor = self._opened()
        else:
            self._descriptor = self._kept(self._descriptor)
        self._write(self._descriptor, text.encode())

    def close(self) -> None:
        """Close it; a further row opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        descriptor = os.open(str(self._path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._size = os.fstat(descriptor).st_size
        return descriptor

    def _kept(self, descriptor: int) -> int:
        """Return the descriptor of the file, written again if it is no longer at its path."""
        mine, found = os.fstat(descriptor), self._path.stat() if os.path.lexists(self._path) else None
        if found is not None and os.path.samestat(mine, found):
            if mine.st_size < self._size:
                lost = self._size - mine.st_size
                self._print(f"{lost} of its {self._size} bytes were cut off; these rows are lost")
                self._size = mine.st_size
            return descriptor
        became = "removed"
        if found is not None:
            other = _free_name(self._path)
            self._path.rename(other)
            became = f"replaced by another file, now {other.name}"
        fresh = self._opened()
        for place in range(0, mine.st_size, _COPIED_BYTES):
            self._write(fresh, os.pread(descriptor, _COPIED_BYTES, place))
        os.close(descriptor)
        self._print(f"was {became}; it is written again with the rows so far")
        return fresh

    def _write(self, descriptor: int, data: bytes) -> None:
        self._size += len(data)
        while data:
            data = data[os.write(descriptor, data) :]

    def _print(self, sentence: str) -> None:
        print(f"flexrlhf: {self._path}: {sentence}", file=sys.stderr, flush=True)


def replace_directory(fresh: Path, directory: Path) -> None:
    """Give a filled directory its final name, in the place of the one that has it."""
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def set_aside_checkpoints(directory: Path, from_step: int) -> None:
    """Rename checkpoints of ``from_step`` and later, which the run that goes on before them will write anew."""
    for path in sorted((directory / FOLDER).glob("step-*")):
        number = path.name.removeprefix("step-")
        if number.isdigit() and int(number) >= from_step:
            path.rename(_free_name(path.with_name(path.name + ABANDONED)))


def remove_abandoned(directory: Path, next_step: int) -> None:
    """Remove the abandoned checkpoints before steps up to ``next_step``, of which there is a new one."""
    for path in (directory / FOLDER).glob(f"step-*{ABANDONED}*"):
        number = path.name.removeprefix("step-").partition(ABANDONED)[0]
        if number.isdigit() and int(number) <= next_step:
            shutil.rmtree(path, ignore_errors=True)


def trim_lines(path: Path, key: str, limit: int) -> None:
    """Keep the rows of a jsonl file with a ``key`` below ``limit``; a row that was cut in writing is dropped."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines(keepends=True) if _number(line, key) < limit]
    fresh = path.with_name(path.name + ".writing")
    fresh.write_text("".join(kept))
    fresh.replace(path)


def rows_below(path: Path, key: str, limit: int) -> set[int]:
    """Return the values of ``key`` below ``limit`` in the rows of a jsonl file."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return {int(number) for line in lines if (number := _number(line, key)) < limit}


def _number(line: str, key: str) -> float:
    try:
        return float(json.loads(line)[key])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a jsonl file; none when the run did not write it."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a timeline: everything but its spans."""
    facts: dict[str, Any] = json.loads(path.read_text())["otherData"]
    return facts


def _free_name(path: Path) -> Path:
    if not path.exists() and path.name.endswith(ABANDONED):
        return path
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())
