"""Times that ``flexrlhf profile`` measured on a machine, and their JSON file. All times are in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes

VERSION = 1
MeasuredPrimitive = Literal["all_gather", "all_to_all", "point_to_point"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Record):
    """Time of a call on some rows.

    rows:     rows of the call
    seconds:  median over the repetitions
    spread:   range of the middle half of the repetitions, relative to the median
    tokens:   tokens that a forward or training call computed, or of the prompts that a generation read; None:
              ``ModelTimes.width`` or ``prompt`` of each row
    """

    rows: int
    seconds: float
    spread: float = 0.0
    tokens: int | None = None


Points = tuple[Point, ...]


class LinearTime(_Record):
    """Seconds that grow with bytes: ``start + items * per_item + bytes * per_byte``; items are messages or tensors."""

    start: float
    per_byte: float
    per_item: float = 0.0

    def seconds(self, size: float, items: float = 0) -> float:
        return self.start + items * self.per_item + size * self.per_byte


class ModelTimes(_Record):
    """Times of one model's calls, each replica on ranks of its own, all ranks of the machine at work.

    model:    shape of the model
    engine:   engine that ran it
    item:     bytes of a weight
    tp:       tensor-parallel ranks
    width:    tokens of the longest sequence
    prompt:   tokens of a row in ``prefill``
    row:      tokens of a row of the passes of ``forward`` and ``train``, in the mean; None: ``width``
    forward:  forward passes
    prefill:  passes over prompts that sample the first token
    step:     each further decoding step
    train:    one optimizer step by number of replicas, with so many rows on each, including the sum of gradients over
              them
    """

    model: Transformer
    engine: str
    item: int
    tp: int
    width: int
    prompt: int
    row: int | None = None
    forward: Points = ()
    prefill: Points = ()
    step: Points = ()
    train: dict[int, Points] = {}

    @property
    def points(self) -> Points:
        """All measured calls."""
        return sum(self.train.values(), self.forward + self.prefill + self.step)


class Machine(_Record):
    """Machine that was measured.

    date:     when
    torch:    version of torch
    device:   device type
    cores:    CPU cores
    threads:  threads of each rank
    ranks:    ranks that were at work
    """

    date: str
    torch: str
    device: str
    cores: int
    threads: int
    ranks: int


class Measurements(_Record):
    """All measurements of a machine.

    version:         version of the file's format
    machine:         where they were made
    models:          calls of each measured model
    combine:         advantages, by rows
    bookkeeping:     trainer's own time around each Run
    statistics:      trainer's own time around a Run that reports metrics, which replicas add up
    contention:      how much longer a call takes with so many ranks at work than with one
    memory_bytes_s:  bandwidth at which weights are read
    reduce:          a sum over all ranks
    moves:           moves of columns by primitive; items are messages
    sync:            weight sync; items are tensors
    switch:          Offload and Reload
    save:            writing weights
    network_gb_s:    of the slowest link between two machines; None with one
    environments:    calls of the environments of the runs
    """

    version: int = VERSION
    machine: Machine
    models: tuple[ModelTimes, ...]
    combine: Points = ()
    bookkeeping: float
    statistics: float
    contention: dict[int, float]
    memory_bytes_s: float
    reduce: LinearTime | None = None
    moves: dict[MeasuredPrimitive, LinearTime] = {}
    sync: LinearTime | None = None
    switch: LinearTime
    save: LinearTime
    network_gb_s: float | None = None
    environments: tuple[EnvironmentTimes, ...] = ()

    @property
    def spread(self) -> float:
        """Mean range of the middle half of a call's repetitions, relative to their median; long calls count more."""
        points = [point for times in self.models for point in times.points]
        seconds = sum(point.seconds for point in points)
        return sum(point.seconds * point.spread for point in points) / seconds if seconds else 0.0


def read_measurements(path: Path | str) -> Measurements:
    """Read the measurements in ``path``. Raises UserError for a file that ``flexrlhf profile`` has not written."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; flexrlhf profile -o {path} measures and writes it")
    try:
        raw = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        raise UserError(f"{path}: not JSON; give a file that flexrlhf profile has written") from None
    version = raw.get("version") if isinstance(raw, dict) else None
    if version != VERSION:
        raise UserError(f"{path}: measurements of version {version}, expected {VERSION}; run flexrlhf profile again")
    wrong = next(_no_measurements(raw), None)
    if wrong is not None:
        raise UserError(f"{path}: {wrong}, where a measurement is a number of at least 0; run flexrlhf profile again")
    try:
        return Measurements.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place}: {first['msg'].lower()}; run flexrlhf profile again") from None


def _no_measurements(value: Any, place: str = "") -> Iterator[str]:
    """Yield the places of numbers that are negative or not finite."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _no_measurements(part, f"{place}.{key}" if place else str(key))
    elif isinstance(value, int | float) and not 0 <= value < inf:
        yield f"{place} is {value}"


def are_measurements(text: str) -> bool:
    """Whether a text is one of ``write_measurements``, of any version."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and {"version", "machine", "memory_bytes_s"} <= set(raw)


def write_measurements(path: Path, measured: Measurements) -> None:
    """Write the file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".writing")
    fresh.write_text(measured.model_dump_json(indent=1) + "\n")
    fresh.replace(path)
