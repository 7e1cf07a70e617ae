"""Times that ``flexrlhf profile`` measured on a machine, and their JSON file. All times are in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flexrlhf.api import CallKind, UserError
from flexrlhf.guideline.costs.cost_model import Transformer
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes

VERSION = 2
MeasuredPrimitive = Literal["all_gather", "all_to_all", "point_to_point"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Record):
    """Time of a call on some rows.

    rows:     rows of the call
    seconds:  median over the repetitions, of layers the lower quartile
    spread:   range of the middle half of the repetitions, relative to the median
    tokens:   tokens that a forward or training pass computed, or of the prompts that a generation read; None: of a
              call whose time depends on its rows
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


class DecodeTimes(_Record):
    """Times of a decoding step by rows, with so many columns in the cache of keys and values (in the mean of several
    steps)."""

    cache: float
    points: Points


PassKind = Literal["forward", "train", "prefill"]


class PartTimes(_Record):
    """Times of one part of a model in a pass, by the tokens of the pass.

    forward:  forward passes
    train:    forward and backward passes, without the optimizer step
    prefill:  passes over prompts that sample the first token
    step:     each further decoding step, by columns of the cache
    """

    forward: Points = ()
    train: Points = ()
    prefill: Points = ()
    step: tuple[DecodeTimes, ...] = ()


class LayerTimes(_Record):
    """Times of the layers of a model on a rank.

    embedding:  the embedding
    block:      one layer between embedding and head
    head:       everything else of a pass: the last norm, the head, and the layout of its sequences
    summed:     whether tensor-parallel ranks computed them, with their sums; else a rank its slice alone
    """

    embedding: PartTimes
    block: PartTimes
    head: PartTimes
    summed: bool = False


class ModelTimes(_Record):
    """Times of a model's layers, each rank with layers of its own, all ranks of the machine at work.

    model:   shape of the model
    engine:  engine that ran it
    item:    bytes of a weight
    shards:  ranks over which its layers were sharded, whose gathers are included; 1: none
    width:   tokens of the longest sequence
    prompt:  tokens of the longest prompt
    row:     tokens of a row of the passes of ``forward`` and ``train``, in the mean; None: ``width``
    layers:  by tensor-parallel ranks
    update:  an optimizer step, by number of replicas: bytes are the trained parameters' on a rank in float32, items its
             layers; of several replicas with the sum of gradients over them
    """

    model: Transformer
    engine: str
    item: int
    shards: int = 1
    width: int
    prompt: int
    row: int | None = None
    layers: dict[int, LayerTimes]
    update: dict[int, LinearTime] = {}

    def measures(self, kind: CallKind) -> bool:
        """Whether calls of this kind were measured."""
        head = self.layers[1].head
        return bool({"generate": head.step, "forward": head.forward, "train": head.train}[kind])

    @property
    def points(self) -> Points:
        """All times of parts."""
        parts = [part for each in self.layers.values() for part in (each.embedding, each.block, each.head)]
        passes = sum((part.forward + part.train + part.prefill for part in parts), ())
        return passes + sum((step.points for part in parts for step in part.step), ())


class Machine(_Record):
    """Machine that was measured.

    date:          when
    torch:         version of torch
    transformers:  version of transformers
    device:        device type
    cores:         CPU cores
    threads:       threads of each rank
    ranks:         ranks that were at work
    """

    date: str
    torch: str
    transformers: str
    device: str
    cores: int
    threads: int
    ranks: int


class Measurements(_Record):
    """All measurements of a machine.

    version:         version of the file's format
    machine:         where they were made
    models:          layers of each measured model
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
