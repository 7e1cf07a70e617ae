"""Events of a run: plain data that rank 0 sends to whatever displays them, in its own process or in the launcher's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunBegins:
    """Beginning of a run on its ranks, or of another attempt at it.

    run:     name
    title:   algorithm, strategy, devices
    places:  a row of texts for each placed model: what runs where
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
    rare:  whether few steps have it, so that it is named where it takes long
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


def dump_event(event: Event) -> str:
    """Return an event as a line, which ``load_event`` reads."""
    return json.dumps({"kind": type(event).__name__, **asdict(event)})


def load_event(line: str) -> Event:
    """Return the event of ``dump_event``."""
    raw = json.loads(line)
    kind = KINDS[raw.pop("kind")]
    if kind is RunBegins:
        raw["places"] = tuple(map(tuple, raw["places"]))
    return kind(**raw)


def discard(_: Event) -> None:
    """Display nothing: ranks other than 0."""


class EventFile:
    """File to which rank 0 appends its events, a line each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, event: Event) -> None:
        """Append ``event``."""
        self._file.write(dump_event(event) + "\n")


class EventReader:
    """Reader of a file of events while it grows."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open("rb")
        self._rest = b""

    def read(self) -> list[Event]:
        """Return the events that have come since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [load_event(line.decode()) for line in lines]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
