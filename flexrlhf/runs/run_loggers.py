"""All loggers of a run: they receive rows of metrics in a thread of their own, so that no rank waits for a server."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flexrlhf.config.output_settings import LoggerSpec
from flexrlhf.config.plugins import load_plugin
from flexrlhf.config.secrets import without_secrets
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.errors import UserError, one_line
from flexrlhf.runs.logger import LoggedRun, RunLogger

FILES = ("config.yaml", "plan.txt", "metrics.jsonl", "samples.jsonl", "timeline.json")
"""Files of a run that become artifacts."""
FILE = "loggers.json"


@dataclass(frozen=True)
class LoggerState:
    """State of one logger.

    identifier:  of the run in its library; None: it has none
    next_step:   the first step that it has not received
    """

    identifier: str | None
    next_step: int


STATES = TypeAdapter(dict[str, LoggerState])
"""JSON of the states of a run's loggers, by name."""


class _Attached:
    """Logger of a run, and how far it has come."""

    def __init__(self, name: str, run_name: str, logger: RunLogger, next_step: int) -> None:
        self.name, self._run_name, self._logger = name, run_name, logger
        self._next_step = next_step
        self._has_failed = False

    @property
    def state(self) -> LoggerState:
        return LoggerState(self._logger.identifier, self._next_step)

    def log(self, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a step, unless it has been logged before, or a step before it has failed."""
        step = int(row["step"])
        if self._has_failed or step < self._next_step:
            return
        try:
            self._logger.log_row(row)
            if samples:
                self._logger.log_samples(step, samples)
        except self._logger.errors() as error:
            self._warn(error, f"its rows from step {step} on are in metrics.jsonl alone, until the run is resumed")
        else:
            self._next_step = step + 1

    def finish(self, files: Sequence[Path], is_whole: bool) -> None:
        """Log the files of the run and end."""
        try:
            self._logger.finish(files, is_whole)
        except self._logger.errors() as error:
            if not self._has_failed:
                self._warn(error, "the files of the run are not logged")

    def _warn(self, error: Exception, what: str) -> None:
        self._has_failed = True
        print(f"flexrlhf: {self._run_name}: logger {self.name}: {_problem(error)}; {what}", file=sys.stderr, flush=True)


class RunLoggers:
    """Loggers of a run; without any it does nothing."""

    def __init__(self, directory: Path, attached: Sequence[_Attached] = ()) -> None:
        self._directory, self._attached = directory, attached
        self._thread = ThreadPoolExecutor(1, "loggers") if attached else None
        self._jobs: deque[Future[None]] = deque()

    @classmethod
    def open(cls, spec: Spec, directory: Path) -> RunLoggers:
        """Return the loggers of a run, which log the rows of its directory that they have not received before.

        Raises UserError if one is not installed or cannot begin.
        """
        cls.check(spec)
        states = read_states(directory) if spec.loggers else {}
        attached = [_open(each, spec, directory, states.get(each.name)) for each in spec.loggers]
        loggers = cls(directory, attached)
        if attached:
            samples = _read_lines(directory / "samples.jsonl")
            for row in _read_lines(directory / "metrics.jsonl"):
                loggers.log(row, [each for each in samples if each["step"] == row["step"]])
        return loggers

    @staticmethod
    def check(spec: Spec) -> None:
        """Raise UserError for a logger whose library is not installed, or that could not begin on this machine."""
        for logger in spec.loggers:
            kind: type[RunLogger] = load_plugin("loggers", logger.name)
            for module in kind.modules:
                if find_spec(module) is None:
                    raise UserError(
                        f"loggers: {logger.name} needs the package {module}, which is not installed; "
                        f"pip install 'flexrlhf[{logger.name}]'"
                    )
            kind.check(logger)

    def log(self, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log a row of metrics and the samples of its step, some time later."""
        if self._thread is not None:
            self._jobs.append(self._thread.submit(self._log, dict(row), list(samples)))
            self._check(waits=False)

    def finish(self, is_whole: bool) -> None:
        """Wait until everything is logged, and end. ``is_whole``: whether all steps are done."""
        if self._thread is None:
            return
        files = [path for name in FILES if (path := self._directory / name).exists()]
        self._jobs.extend(self._thread.submit(each.finish, files, is_whole) for each in self._attached)
        self._check(waits=True)
        self._thread.shutdown()

    def _check(self, waits: bool) -> None:
        """Raise errors that are no library's: a state that cannot be written, or an error of ours."""
        while self._jobs and (waits or self._jobs[0].done()):
            self._jobs.popleft().result()

    def _log(self, row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        for each in self._attached:
            each.log(row, samples)
        fresh = self._directory / f"{FILE}.writing"
        fresh.write_bytes(STATES.dump_json({each.name: each.state for each in self._attached}) + b"\n")
        fresh.replace(self._directory / FILE)


def _open(logger: LoggerSpec, spec: Spec, directory: Path, state: LoggerState | None) -> _Attached:
    settings: Mapping[str, Any] = without_secrets(read_yaml(spec.dump()))
    run = LoggedRun(spec, settings, directory, None if state is None else state.identifier)
    kind: type[RunLogger] = load_plugin("loggers", logger.name)
    try:
        opened = kind(logger, run)
    except kind.errors() as error:
        raise UserError(f"loggers: {logger.name} cannot begin ({_problem(error)}); {kind.hint}") from None
    return _Attached(logger.name, spec.name, opened, 0 if state is None else state.next_step)


def _problem(error: Exception) -> str:
    """Return the text of an error in one line, without users and passwords of addresses."""
    return without_secrets(one_line(str(error))) or type(error).__name__


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_states(directory: Path) -> dict[str, LoggerState]:
    """Return the states of the loggers of the run in ``directory`` by name; none of a run that begins."""
    path = directory / FILE
    if not path.exists():
        return {}
    try:
        return STATES.validate_json(path.read_bytes())
    except ValueError:
        raise UserError(f"{path}: damaged; remove it, and the loggers begin anew") from None
