"""Files of a run's instructions as they happen, which are there also of a rank that was killed.

``flight/rank-<n>.jsonl`` has a line for every begin and every end of an instruction, and stays only where a run fails.
From it and from the reports of ranks at their end come ``failure/rank-<n>.json`` and ``timeline.json``.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from flexrlhf.runs.row_file import RowFile
from flexrlhf.timeline import Span, Trace

_FLIGHT = "flight"
TIMELINE = "timeline"
"""Folder with the spans until the last checkpoint, a file for each rank."""
_ENDED = "ended by the launcher"
"""Reason of a rank that was ended because another one had failed, or the launcher was stopped."""
_MOST_INSTRUCTIONS = 50
"""Instructions of a rank in the record of its end."""


class FlightLog:
    """Log of the instructions of one rank, of its last steps.

    Written without buffers, so that it outlives a killed process. A file system that fails ends the log, not the run.

    last:  instructions that began last.
    """

    def __init__(self, directory: Path, header: Mapping[str, Any], keep_steps: int) -> None:
        """Continue the log of ``directory``. ``header``: rank, host, run and models of this process."""
        self.last: deque[Span] = deque(maxlen=_MOST_INSTRUCTIONS)
        self._path = directory / _FLIGHT / f"rank-{header['rank']}.jsonl"
        self._header = header
        self._keep_steps = keep_steps
        self._first_step: int | None = None
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            self._open()

    def begin(self, span: Span) -> None:
        """Write that an instruction begins. After every ``keep_steps`` steps the older file is dropped."""
        self.last.append(span)
        self._first_step = span.step if self._first_step is None else self._first_step
        if span.step >= self._first_step + self._keep_steps:
            self._first_step = span.step
            self._turn()
        self._write({"begin": asdict(span)})

    def end(self, span: Span) -> None:
        """Write that an instruction has ended."""
        self._write({"end": asdict(span)})

    def close(self) -> None:
        """Remove the log of a run that ended well."""
        self._stop()
        with suppress(OSError):
            for path in (self._path, _older(self._path)):
                path.unlink(missing_ok=True)
            # the last rank's
            self._path.parent.rmdir()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._write({"header": dict(self._header)})

    def _turn(self) -> None:
        if self._file is not None:
            self._stop()
            with suppress(OSError):
                os.replace(self._path, _older(self._path))
                self._open()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError:
            self._stop()

    def _stop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class Flight:
    """Content of a log.

    header:   of the process that wrote it last
    spans:    instructions that ended, then the one that had begun, with an ``end`` of 0
    """

    def __init__(self, path: Path) -> None:
        self.header: dict[str, Any] = {}
        self.spans: list[Span] = []
        self._current: Span | None = None
        for file in (_older(path), path):
            for line in file.read_bytes().splitlines() if file.exists() else ():
                self._add(line)
        if self._current is not None:
            self.spans.append(self._current)

    @property
    def place(self) -> str:
        """Last step and instruction, such as ``step 3, run scores on reward``; empty before its first instruction."""
        return f"step {self.spans[-1].step}, {self.spans[-1].kind} {self.spans[-1].label}" if self.spans else ""

    def _add(self, line: bytes) -> None:
        # the last line of a full disk is cut
        with suppress(json.JSONDecodeError, UnicodeDecodeError):
            entry = json.loads(line)
            if "header" in entry:
                self.header, self._current = entry["header"], None
            elif "begin" in entry:
                self._current = Span(**entry["begin"])
            else:
                self.spans.append(Span(**entry["end"]))
                self._current = None


@dataclass(frozen=True)
class FlightLogs:
    """Logs and records of the ranks of the run in ``directory``."""

    directory: Path

    TERMINATED: ClassVar[str] = "ended by SIGTERM"
    """Reason of a rank that has received the signal."""

    @property
    def are_there(self) -> bool:
        """Whether a rank has a log: the run goes on, or has failed."""
        return any(self._paths())

    @property
    def records(self) -> Path:
        """Folder with the record of each rank of a run that has failed."""
        return self.directory / "failure"

    def writer(self, header: Mapping[str, Any], keep_steps: int) -> FlightLog:
        """Continue the log of a rank. ``header``: rank, host, run and models of this process. ``keep_steps``: last
        steps that it has."""
        return FlightLog(self.directory, header, keep_steps)

    def read(self, rank: int) -> Flight:
        """Return the log of a rank; an empty one without a file."""
        return Flight(self.directory / _FLIGHT / f"rank-{rank}.jsonl")

    def spans(self) -> list[Span]:
        """Return the spans that ended, of a run that goes on or has failed; none if it has no logs."""
        return self._all_spans()[1]

    def saved_spans(self) -> Iterator[Span]:
        """Yield the spans until the last checkpoint, of this process and those that the run goes on from."""
        for path in sorted((self.directory / TIMELINE).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                yield from Span.from_json(json.loads(line)["spans"])

    def saved_file(self, rank: int) -> Path:
        """Return the file with the spans of ``rank`` until the last checkpoint."""
        return self.directory / TIMELINE / f"rank-{rank:05d}.jsonl"

    def drop_saved(self, next_step: int) -> None:
        """Drop the spans of the checkpoints after the one before ``next_step``."""
        for path in (self.directory / TIMELINE).glob("*.jsonl"):
            RowFile(path).trim("next_step", next_step + 1)

    @classmethod
    def is_consequence(cls, reason: str) -> bool:
        """Return whether ``reason`` is that another rank has failed, or the launcher was stopped."""
        return reason in (_ENDED, cls.TERMINATED)

    def write_record(self, rank: int, record: Mapping[str, Any]) -> None:
        """Write ``failure/rank-<n>.json``, whole or not at all; nothing where the file system fails."""
        path = self._record(rank)
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(record, indent=1) + "\n")
            temporary.replace(path)

    def complete(self, ranks: Iterable[int], reasons: Mapping[int, str]) -> None:
        """Write the records that ``ranks`` could not write themselves, and the timeline so far.

        reasons:  rank that failed → how it ended; the launcher has ended the others.
        """
        for rank in ranks:
            flight = self.read(rank)
            if flight.header and not self._has_record(rank, flight.header):
                instructions = [asdict(span) for span in flight.spans[-_MOST_INSTRUCTIONS:]]
                reason = reasons.get(rank, _ENDED)
                record = {**flight.header, "reason": reason, "at": flight.place, "instructions": instructions}
                self.write_record(rank, {**record, "waiting": None, "stack": []})
        self.write_timeline()

    def write_timeline(self) -> None:
        """Write ``timeline.json`` from the logs of all ranks, as a run that ends well does from their reports."""
        temporary = self.directory / f".timeline.json.{os.getpid()}"
        # a file that is cut off by a full disk is no reason to end without the cause
        with suppress(OSError, json.JSONDecodeError):
            flights, spans = self._all_spans()
            Trace(spans, {"failed": True, "ranks": [flight.header for flight in flights]}).write(temporary)
            temporary.replace(self.directory / "timeline.json")

    def _record(self, rank: int) -> Path:
        return self.records / f"rank-{rank}.json"

    def _has_record(self, rank: int, header: Mapping[str, Any]) -> bool:
        """Return whether the process of ``header`` wrote its record."""
        path = self._record(rank)
        if not path.exists():
            return False
        record = json.loads(path.read_text())
        return all(record.get(key) == value for key, value in header.items())

    def _paths(self) -> Iterator[Path]:
        return (self.directory / _FLIGHT).glob("rank-*.jsonl")

    def _all_spans(self) -> tuple[list[Flight], list[Span]]:
        """Return the logs of all ranks, and the spans that ended, of this attempt and those before."""
        names = [path.stem.partition("-")[2] for path in self._paths()]
        numbers = sorted(int(name) for name in names if name.isdecimal())
        flights = [self.read(rank) for rank in numbers]
        spans = [span for flight in flights for span in flight.spans if span.end]
        logged = {(span.rank, span.start) for span in spans}
        return flights, spans + [span for span in self.saved_spans() if (span.rank, span.start) not in logged]


def _older(path: Path) -> Path:
    return path.with_suffix(".old.jsonl")
