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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from flexrlhf.config.spec import Spec
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.runs.checkpoint_directory import FOLDER, CheckpointDirectory
from flexrlhf.runs.durable_files import ABANDONED, WRITING, free_name
from flexrlhf.runs.episode_log import drop_replies
from flexrlhf.runs.flight_log import FlightLogs
from flexrlhf.runs.row_file import RowFile

_FULL_OR_READ_ONLY = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of writing, which have no path where the file was open before."""
StatusWord = Literal["running", "stopped", "finished"]


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

    state: StatusWord
    next_step: int
    steps: int
    start_seconds: float | None = None


@dataclass(frozen=True)
class RunDirectory:
    """Files of the run in ``path``, as far as they are there."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> Path:
        """Resolved YAML."""
        return self.path / "config.yaml"

    @property
    def timeline(self) -> Path:
        """Chrome trace of the last steps."""
        return self.path / "timeline.json"

    @property
    def metrics(self) -> RowFile:
        """Metrics of each step."""
        return RowFile(self.path / "metrics.jsonl")

    @property
    def samples(self) -> RowFile:
        """Samples: some responses, as text."""
        return RowFile(self.path / "samples.jsonl")

    @property
    def outcomes(self) -> RowFile:
        """Outcomes of rows: for each step the numbers of its prompts, and rows by outcome."""
        return RowFile(self.path / "rows.jsonl")

    @property
    def calls(self) -> RowFile:
        """Calls of a program in each step."""
        return RowFile(self.path / "calls.jsonl")

    @property
    def replans(self) -> RowFile:
        """Decisions whether to go on under another placement."""
        return RowFile(self.path / "replans.jsonl")

    @property
    def flights(self) -> FlightLogs:
        """Instructions of the ranks as they happen, and the records of ranks that failed."""
        return FlightLogs(self.path)

    @property
    def checkpoints(self) -> list[CheckpointDirectory]:
        """Checkpoints of the run, the newest first."""
        return CheckpointDirectory.all_of(self.path)

    def checkpoint(self, next_step: int) -> CheckpointDirectory:
        """Return the checkpoint before ``next_step``, which need not be there."""
        return CheckpointDirectory.before(self.path, next_step)

    @property
    def status(self) -> RunStatus | None:
        """Status of the run; None if there is none. Raises UserError for a damaged one."""
        if not os.path.isfile(self._status):
            # of a name that is too long, too
            return None
        try:
            return TypeAdapter(RunStatus).validate_json(self._status.read_bytes())
        except (OSError, ValueError):
            raise UserError(f"{self._status}: damaged; remove it") from None

    def has_finished(self, steps: int) -> bool:
        """Return whether a run of so many ``steps`` has ended here. Raises UserError as ``status``."""
        status = self.status
        return status is not None and status.state == "finished" and status.steps >= steps

    def write_status(self, state: StatusWord, next_step: int, steps: int, start_seconds: float | None = None) -> None:
        """Write ``status.json``, never in part. The arguments are the fields of ``RunStatus``."""
        self._write(RunStatus(state, next_step, steps, start_seconds))

    def mark_stopped(self) -> None:
        """Write that the run has stopped, if its ranks were ended in its middle."""
        status = self.status
        if status is not None and status.state == "running":
            self._write(replace(status, state="stopped"))

    @property
    def _status(self) -> Path:
        return self.path / "status.json"

    def _write(self, status: RunStatus) -> None:
        fresh = self._status.with_name(self._status.name + WRITING)
        fresh.write_text(json.dumps(asdict(status)) + "\n")
        fresh.replace(self._status)

    @property
    def is_there(self) -> bool:
        """Whether a run has begun here."""
        return self.metrics.path.is_file() or (self.config.is_file() and self._status.is_file())

    def facts(self) -> dict[str, Any]:
        """Return the metadata of the timeline: everything but its spans."""
        facts: dict[str, Any] = json.loads(self.timeline.read_text())["otherData"]
        return facts

    def prepare(self, spec: Spec, plan_text: str, continues: bool) -> IO[str]:
        """Make the directory with config and plan. Returns its lock, which is released when that is closed.

        An existing one is renamed to ``<name>.1``, ``<name>.2`` …, which is printed, unless the run ``continues``
        there. Models and checkpoints in it that were not written to their end are removed.
        Raises UserError for a directory that a running process uses, or that cannot be written.
        """
        directory = self.path
        try:
            if directory.exists():
                self.lock().close()
                for left in (*directory.glob(f"*{WRITING}/"), *(directory / FOLDER).glob(f"*{WRITING}/")):
                    shutil.rmtree(left)
                if not continues:
                    if (sentence := self.moved_text()) is not None:
                        print(f"flexrlhf: {sentence}", file=sys.stderr)
                    directory.rename(free_name(directory))
            directory.mkdir(parents=True, exist_ok=True)
            lock = self.lock()
            self.config.write_text(spec.dump())
            (directory / "plan.txt").write_text(plan_text + "\n")
            if not continues:
                self.write_status("running", 0, spec.steps)
        except OSError as error:
            reason = f"{directory} cannot be written ({error.strerror})"
            raise UserError(f"runs: {reason}; set runs: to another directory") from None
        return lock

    def moved_text(self) -> str | None:
        """Return a sentence about an earlier run, whose directory is about to be renamed; None without one."""
        status, moved = self.status, f"is moved to {free_name(self.path)}"
        if status is None:
            return None
        if status.state == "finished":
            return f"{self}: an earlier run {moved}"
        found = self.checkpoints
        hint = f"; --resume auto would go on from {found[0]}" if found else ""
        return f"{self}: an earlier run has not finished and {moved}{hint}"

    def lock(self) -> IO[str]:
        """Lock the directory for this process. Raises UserError if another process has locked it."""
        file = self._lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise UserError(f"{self}: {owner} is using it; wait for its end, or give this run another name") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file

    @property
    def is_locked(self) -> bool:
        """Whether a process uses the directory."""
        if not self._lock.is_file():
            return False
        try:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            # of a lock that cannot be read nothing is known
            return False
        return False

    @property
    def _lock(self) -> Path:
        return self.path / ".lock"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise RunStopped if the body cannot write its files here: full, read-only or removed meanwhile."""
        try:
            yield
        except OSError as error:
            path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
            is_inside = path is not None and path.absolute().is_relative_to(self.path.absolute())
            if not is_inside and error.errno not in _FULL_OR_READ_ONLY:
                raise
            where = path if is_inside else self.path
            raise RunStopped(f"{where}: cannot be written ({error.strerror or error})") from None

    def go_back(self, next_step: int, steps: int) -> None:
        """Remove the records of ``next_step`` and later steps of an interrupted run of so many ``steps``."""
        self._set_aside_checkpoints(next_step + 1)
        for rows in (self.metrics, self.samples, self.outcomes, self.replans, self.calls):
            rows.trim("step", next_step)
        self.flights.drop_saved(next_step)
        self.write_status("running", next_step, steps)

    def _set_aside_checkpoints(self, from_step: int) -> None:
        """Rename checkpoints of ``from_step`` and later, which the run that goes on before them will write anew."""
        for path in sorted((self.path / FOLDER).glob("step-*")):
            number = path.name.removeprefix("step-")
            if number.isdigit() and int(number) >= from_step:
                path.rename(free_name(path.with_name(path.name + ABANDONED)))

    def drop_checkpoints(self, keep_last: int, next_step: int) -> None:
        """Remove all but the ``keep_last`` newest checkpoints, and everything that only these are needed for.

        next_step:  before which there is a new one: abandoned ones up to it are removed, too.
        """
        found = self.checkpoints
        kept = found[:keep_last]
        for old in found[len(kept) :]:
            shutil.rmtree(old.path, ignore_errors=True)
        drop_replies(self.path, kept[-1])
        for path in (self.path / FOLDER).glob(f"step-*{ABANDONED}*"):
            number = path.name.removeprefix("step-").partition(ABANDONED)[0]
            if number.isdigit() and int(number) <= next_step:
                shutil.rmtree(path, ignore_errors=True)
