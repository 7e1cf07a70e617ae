"""Failures of ranks, as launchers exchange them: which one ended the run, in one sentence."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flexrlhf.comm.deadlines import DeadlineError
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.flight_log import FlightLogs

FailureKind = Literal["killed", "user", "error", "node", "waited", "closed", "ended"]
_ORDER: tuple[FailureKind, ...] = ("killed", "user", "error", "node", "waited", "closed", "ended")
"""Kinds, most telling first: a rank that ended by itself before one that waited for it or that was ended."""
_AGENT_SECONDS = 5.0
"""Time in which agents notice a killed rank; a SIGKILL of their own comes half a minute after the first failure."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class Failure:
    """End of a rank or of a node.

    kind:      ``killed`` by a signal; an error of the ``user`` or another ``error``; a ``node`` that is lost; a rank
               that ``waited`` in vain, or whose connection ``closed``; one that was ``ended`` by the launcher.
    sentence:  for the user.
    time:      seconds since the epoch.
    """

    kind: FailureKind
    sentence: str
    time: float


def root_cause(failures: Iterable[Failure]) -> Failure:
    """Return the failure of a rank that failed by itself, not of one that waited for it or was ended afterwards."""
    found = list(failures)
    first = min(failure.time for failure in found)
    late = [each for each in found if each.kind == "killed" and each.time > first + _AGENT_SECONDS]
    return min((each for each in found if each not in late), key=lambda each: (_ORDER.index(each.kind), each.time))


def write_error(error: BaseException) -> None:
    """Write the error of this rank to the file that its launcher reads; nothing without one."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    now = time.time()
    trace = "".join(traceback.format_exception(error))
    extra = {"py_callstack": trace, "timestamp": str(int(now))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    # whole or not at all: the launcher reads whatever is there
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(
        json.dumps({"message": message, "kind": _kind(error), "text": sentence_of(error), "time": now})
    )
    temporary.replace(path)


class ErrorReport:
    """Context whose error is written to the file that the launcher reads."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            write_error(error)


def sentence_of(error: BaseException) -> str:
    """Return the first line of an error, behind the name of its type unless it is a sentence for users."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, UserError | RunStopped) else f"{type(error).__name__}: {lines[0]}"


class FailureReporter:
    """Records of the ranks of this machine in the directory of the run that failed.

    record:  directory of the records, once a rank has failed.
    """

    def __init__(self, plan: Plan, directories: Sequence[Path], ranks: Sequence[int]) -> None:
        """Report on ``ranks``, of the runs in ``directories``."""
        self.record: Path | None = None
        self._plan, self._directories, self._ranks = plan, directories, ranks

    def report(self, failures: Mapping[int, ProcessFailure]) -> list[Failure]:
        """Write the records that ranks could not write themselves; return the failures, one for each failed rank."""
        logs = self._logs()
        found = {rank: self._failure(rank, failure, logs) for rank, failure in failures.items()}
        if logs is not None:
            logs.complete(self._ranks, {rank: failure.sentence for rank, failure in found.items()})
            self.record = logs.records
        return list(found.values())

    def place(self) -> str:
        """Return where the first rank of this machine was, such as ``rank 2 was at step 3, ...``; may be empty."""
        logs, rank = self._logs(), self._ranks[0]
        place = logs.read(rank).place if logs is not None else ""
        return f"rank {rank} was at {place}" if place else ""

    def _logs(self) -> FlightLogs | None:
        """Return the logs of the run that has not ended well: the last one with logs, of the runs of a command."""
        found = [logs for logs in map(FlightLogs, self._directories) if logs.are_there]
        return found[-1] if found else None

    def _failure(self, rank: int, failure: ProcessFailure, logs: FlightLogs | None) -> Failure:
        """Return the failure of a rank, with its last instruction and the first line of its error."""
        flight = logs.read(rank) if logs is not None else None
        data: Mapping[str, Any] = failure.error_file_data if failure.exitcode > 0 else {}
        text = sentence = str(data.get("text", ""))
        # a failed wait names its rank by itself
        if not text.startswith(f"rank {rank} ("):
            models = (
                (flight.header.get("models") if flight else None) or self._plan.placement.names_on(rank) or "no model"
            )
            at = f" at {flight.place}" if flight and flight.place else ""
            how = f"{_exit(failure)}{': ' if text else ''}{text}"
            sentence = f"rank {rank} ({models}; host {socket.gethostname()}) ended the run{at}, {how}"
        return Failure(_kind_of_exit(failure, data), sentence, float(data.get("time", failure.timestamp)))


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, DeadlineError):
        return "waited" if error.cause == "expired" else "closed"
    return "user" if isinstance(error, UserError) else "error"


def _kind_of_exit(failure: ProcessFailure, data: Mapping[str, Any]) -> FailureKind:
    if failure.exitcode < 0:
        return "ended" if failure.exitcode == -signal.SIGTERM else "killed"
    kind: FailureKind = data.get("kind", "error")
    return kind


def _exit(failure: ProcessFailure) -> str:
    return f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
