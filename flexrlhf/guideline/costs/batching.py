"""Number of rows that are decoded together while responses of different lengths end one after the other.

Lengths are a sample of a distribution. A batch of ``rows`` has, after as many steps as a share ``alive`` of the sample
survives, ``rows * alive`` live rows on the average, and any at all with probability ``1 - (1 - alive) ** most``, where
``most`` rows could have been as long. Steps are not simulated one by one: the sample is divided into few bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from flexrlhf.guideline.costs.decoders import Batching

EVEN_BINS, TAIL_BINS = 14, 6
"""Bins of a large sample: the tail, which runs long and nearly alone, has one for each length."""


@dataclass(frozen=True)
class DecodePhase:
    """Decoding steps with the same number of live rows.

    steps:  steps, on the average
    rows:   live rows
    age:    tokens of their responses so far
    """

    steps: float
    rows: float
    age: float


@dataclass(frozen=True)
class LengthBin:
    """Decoding steps ``start`` to ``end``, which a share ``alive`` of the rows reaches."""

    start: float
    end: float
    alive: float

    @property
    def steps(self) -> float:
        return self.end - self.start

    @property
    def age(self) -> float:
        return (self.start + self.end) / 2


@lru_cache(maxsize=1024)
def length_bins(responses: tuple[float, ...]) -> tuple[LengthBin, ...]:
    """Divide a sample of response lengths into bins; the first token of a response comes with the prefill."""
    lengths = sorted(max(0.0, length - 1) for length in responses)
    bins, start, ended = [], 0.0, 0
    for count in _counts(len(lengths)):
        end = sum(lengths[ended : ended + count]) / count
        if end > start:
            bins.append(LengthBin(start, end, 1 - ended / len(lengths)))
            start = end
        ended += count
    return tuple(bins)


def _counts(total: int) -> list[int]:
    """Number of lengths in each bin, the shortest first."""
    if total <= EVEN_BINS + TAIL_BINS:
        return [1] * total
    body = total - TAIL_BINS
    bounds = [body * index // EVEN_BINS for index in range(EVEN_BINS + 1)]
    return [high - low for low, high in zip(bounds, bounds[1:], strict=False)] + [1] * TAIL_BINS


def decode_phases(batching: Batching, rows: int, together: int, responses: tuple[float, ...]) -> Iterator[DecodePhase]:
    """Yield the phases of decoding ``rows`` rows, at most ``together`` of them at once."""
    together = max(1, min(rows, together))
    bins = length_bins(responses)
    if batching == "refill":
        yield from _full(rows, together, bins)
        yield from _shrinking(1, together, rows, bins)
        return
    groups, rest = divmod(rows, together)
    group = _static if batching == "static" else _shrinking
    yield from group(groups, together, together, bins)
    if rest:
        yield from group(1, rest, rest, bins)


def _full(rows: int, together: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phase in which the batch is full, until one batch is left; its age is that of a token in the mean."""
    mean = sum(each.steps * each.alive for each in bins)
    if rows > together and mean > 0:
        age = sum(each.steps * each.alive * each.age for each in bins) / mean
        yield DecodePhase((rows - together) / together * mean, together, age)


def _shrinking(groups: int, together: int, most: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phases of ``groups`` batches, one after the other, whose rows leave as they end."""
    for each in bins:
        any_left = 1 - (1 - each.alive) ** most
        yield DecodePhase(groups * each.steps * any_left, together * each.alive / any_left, each.age)


def _static(groups: int, together: int, most: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phases of ``groups`` batches, one after the other, whose rows stay until the longest has ended."""
    for each in bins:
        yield DecodePhase(groups * each.steps * (1 - (1 - each.alive) ** most), together, each.age)
