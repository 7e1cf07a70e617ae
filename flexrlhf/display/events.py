"""Events of a run: plain data that rank 0 sends to whatever displays them, in its own process or in the launcher's."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

LARGEST_FILE = 1 << 20
"""Bytes of read events that a file keeps at most."""


@dataclass(frozen=True)
class RunBegins:
    """Beginning of a run on its ranks, or of another attempt at it.

    run:     name
    title:   algorithm, strategy, devices
    places:  a row for each placed model: its ranks and settings, in words
    steps:   of the whole run
    """

    run: str
    title: str
    places: tuple[tuple[str, ...], ...]
    steps: int


@dataclass(frozen=True)
class Doing:
    """Work that rank 0 begins.

    what:  in words, such as ``loading models`` or ``train_actor on actor``
    step:  number of the step, from 0; None before the first one
    rare:  whether few steps have it, so that it is named if it takes long
    """

    run: str
    what: str
    step: int | None = None
    rare: bool = True


@dataclass(frozen=True)
class Note:
    """Sentence about a run, such as how many rows its data has."""

    run: str
    text: str


@dataclass(frozen=True)
class StepDone:
    """A step whose metrics are written.

    step:  number, from 0
    row:   its metrics
    """

    run: str
    step: int
    steps: int
    row: Mapping[str, float]


@dataclass(frozen=True)
class RunEnds:
    """End of a run on its ranks. ``next_step``: the first one that is not trained on."""

    run: str
    next_step: int


Event = RunBegins | Note | Doing | StepDone | RunEnds
Send = Callable[[Event], None]
"""Receives the events of a run, in order."""
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (RunBegins, Note, Doing, StepDone, RunEnds)}


def load_event(line: str) -> Event:
    """Return the event of a line of an ``EventFile``."""
    raw = json.loads(line)
    kind = KINDS[raw.pop("kind")]
    if kind is RunBegins:
        raw["places"] = tuple(map(tuple, raw["places"]))
    return kind(**raw)


class EventSender:
    """Sender of a rank's events to whatever displays them."""

    def __init__(self, send: Send = lambda _: None) -> None:
        """``send``: displays an event; by default nothing does, as on ranks other than 0."""
        self._send = send

    def begin_run(self, run: str, title: str, places: tuple[tuple[str, ...], ...], steps: int) -> None:
        """Send ``RunBegins``."""
        self._send(RunBegins(run, title, places, steps))

    def do(self, run: str, what: str, step: int | None = None, rare: bool = True) -> None:
        """Send ``Doing``."""
        self._send(Doing(run, what, step, rare))

    def note(self, run: str, text: str) -> None:
        """Send ``Note``."""
        self._send(Note(run, text))

    def end_step(self, run: str, step: int, steps: int, row: Mapping[str, float]) -> None:
        """Send ``StepDone``."""
        self._send(StepDone(run, step, steps, row))

    def end_run(self, run: str, next_step: int) -> None:
        """Send ``RunEnds``."""
        self._send(RunEnds(run, next_step))


class EventFile:
    """File to which rank 0 appends its events, a line each, while a reader may empty it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __call__(self, event: Event) -> None:
        """Append ``event``."""
        line = json.dumps({"kind": type(event).__name__, **asdict(event)})
        with _locked(self._file):
            self._file.write(line.encode() + b"\n")


class EventReader:
    """Reader of a file of events while it grows. It empties the file, so that a long run does not fill a disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        self._rest = b""

    def read(self) -> list[Event]:
        """Return the events that have come since the last call."""
        with _locked(self._file):
            text = self._file.read()
            if self._file.tell() > LARGEST_FILE:
                self._file.truncate(0)
                self._file.seek(0)
        *lines, self._rest = (self._rest + text).split(b"\n")
        return [load_event(line.decode()) for line in lines]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """Lock ``file`` for one process at a time: whole lines are read, and none is lost when the file is emptied."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
