"""Differences of one quantity between two runs: how large, and where first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["column", "move", "metric", "weights"]


@dataclass(frozen=True)
class ColumnEntry:
    """One number of a column, in both runs.

    position:  in the row; None for a column of one number a row
    values:    of the first and of the second run
    ranks:     that wrote the row in each; of a move, that which wrote and that which read it
    """

    row: int
    position: int | None
    values: tuple[float, float]
    ranks: tuple[int, int]


@dataclass(frozen=True)
class Deviation:
    """Largest difference of one quantity in one step.

    step:      None: after the last one
    kind:      a column as written; one as it arrived by a move, against the same run's own; a metric; weights
    name:      of the column, metric or role
    source:    operator that wrote the column or that read it after a move; who reported the metric
    absolute:  largest difference
    size:      relative to the scale of the quantity; for whole numbers how many differ
    limit:     of ``size``
    entry:     the first number of a column beyond the limit
    values:    of a metric
    run:       of a move: the name of the run
    note:      why nothing could be compared
    """

    step: int | None
    kind: Kind
    name: str
    source: str
    absolute: float
    size: float
    limit: float
    entry: ColumnEntry | None = None
    values: tuple[float, float] | None = None
    run: str = ""
    note: str = ""

    @property
    def is_beyond(self) -> bool:
        """Whether the two runs part here; NaN is beyond every limit."""
        return not self.size <= self.limit


def first_beyond(deviations: Sequence[Deviation]) -> Deviation | None:
    """Return the first deviation beyond its limit; of metrics that are reported at once the one furthest beyond."""
    first = next((each for each in deviations if each.is_beyond), None)
    if first is None or first.kind != "metric":
        return first
    at_once = [each for each in deviations if (each.step, each.source) == (first.step, first.source)]
    beyond = [each for each in at_once if each.kind == "metric" and each.is_beyond]
    return max(beyond, key=lambda each: each.size / (each.limit or math.ulp(0.0)))


@dataclass(frozen=True)
class Tie:
    """Responses of one step in which the two runs part at a token that rounding decides.

    rows:    responses
    margin:  largest distance of two perturbed logits, in nats
    """

    step: int
    rows: tuple[int, ...]
    margin: float
