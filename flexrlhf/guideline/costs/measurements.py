"""What ``flexrlhf profile`` measured on a machine, as it lies in a JSON file. All times in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.transformer import Transformer

VERSION = 1
Moving = Literal["all_gather", "all_to_all", "point_to_point"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Record):
    """Median ``seconds`` of a call on ``rows``. ``spread``: of the middle half of the repetitions, over the median."""

    rows: int
    seconds: float
    spread: float = 0.0


Points = tuple[Point, ...]


class Line(_Record):
    """``start + items * per_item + bytes * per_byte``. ``items``: messages, or tensors."""

    start: float
    per_byte: float
    per_item: float = 0.0

    def seconds(self, size: float, items: float = 0) -> float:
        return self.start + items * self.per_item + size * self.per_byte


class ModelTimes(_Record):
    """Calls of one model on a rank of its own, all ranks of the machine at work.

    ``width``: tokens of a row in ``forward`` and ``train``; ``prompt``: in ``prefill``, which draws the first token.
    ``step``: each further decoding step with so many rows. ``train``: one optimizer step, by number of replicas, with
    so many rows on each, the sum of gradients over them included.
    """

    model: Transformer
    engine: str
    item: int
    tp: int
    width: int
    prompt: int
    forward: Points = ()
    prefill: Points = ()
    step: Points = ()
    train: dict[int, Points] = {}


class Machine(_Record):
    """``threads``: of each rank."""

    date: str
    torch: str
    device: str
    cores: int
    threads: int
    ranks: int


class Measurements(_Record):
    """``combine``: advantages. ``bookkeeping``: of the trainer around each Run; ``statistics``: around one that reports
    numbers, which replicas add up. ``contention``: how much longer the same call takes with so many ranks at work as
    with one. ``reduce``: a sum over all ranks. ``sync``: items are tensors. ``memory_bytes_s``: at which weights are
    read."""

    version: int = VERSION
    machine: Machine
    models: tuple[ModelTimes, ...]
    combine: Points = ()
    bookkeeping: float
    statistics: float
    contention: dict[int, float]
    memory_bytes_s: float
    reduce: Line | None = None
    moves: dict[Moving, Line] = {}
    sync: Line | None = None
    switch: Line
    save: Line


def read_measurements(path: Path | str) -> Measurements:
    """Raises UserError in one sentence."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; flexrlhf profile -o {path} measures and writes it")
    try:
        raw = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        raise UserError(f"{path}: not JSON; give a file that flexrlhf profile has written") from None
    found = raw.get("version") if isinstance(raw, dict) else None
    if found != VERSION:
        raise UserError(f"{path}: measurements of version {found}, expected {VERSION}; run flexrlhf profile again")
    try:
        return Measurements.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place}: {first['msg'].lower()}; run flexrlhf profile again") from None


def write_measurements(path: Path, measured: Measurements) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".writing")
    fresh.write_text(measured.model_dump_json(indent=1) + "\n")
    fresh.replace(path)
