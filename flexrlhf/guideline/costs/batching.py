"""How many rows are decoded together while answers of different lengths end one after the other.

Lengths are a sample of a distribution. A batch of ``rows`` has, after as many steps as a share ``alive`` of the sample
survives, ``rows * alive`` live rows on the average, and any at all with the chance ``1 - (1 - alive) ** drawn``, where
``drawn`` rows could have been as long. No step is looked at by itself: the sample is cut into few pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from flexrlhf.guideline.costs.decoders import Batching

EVEN_PIECES, TAIL_PIECES = 14, 6
"""Pieces of a large sample: the tail, that runs long and nearly alone, one by one."""


@dataclass(frozen=True)
class Phase:
    """``steps`` decoding steps, on the average, of ``rows`` that each have ``age`` tokens of their answers."""

    steps: float
    rows: float
    age: float


@dataclass(frozen=True)
class Piece:
    """Steps ``start`` to ``end`` of answers, that a share ``alive`` of the rows lives to see."""

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
def pieces_of(responses: tuple[float, ...]) -> tuple[Piece, ...]:
    """Of a sample of lengths; the first token of an answer is the prefill's."""
    lengths = sorted(max(0.0, length - 1) for length in responses)
    pieces, start, ended = [], 0.0, 0
    for count in _counts(len(lengths)):
        end = sum(lengths[ended : ended + count]) / count
        if end > start:
            pieces.append(Piece(start, end, 1 - ended / len(lengths)))
            start = end
        ended += count
    return tuple(pieces)


def _counts(total: int) -> list[int]:
    """How many lengths, from the shortest on, are one piece."""
    if total <= EVEN_PIECES + TAIL_PIECES:
        return [1] * total
    body = total - TAIL_PIECES
    cuts = [body * index // EVEN_PIECES for index in range(EVEN_PIECES + 1)]
    return [high - low for low, high in zip(cuts, cuts[1:], strict=False)] + [1] * TAIL_PIECES


def phases_of(batching: Batching, rows: int, together: int, responses: tuple[float, ...]) -> Iterator[Phase]:
    """Of ``rows``, at most ``together`` of them at once."""
    together = max(1, min(rows, together))
    pieces = pieces_of(responses)
    if batching == "refill":
        yield from _full(rows, together, pieces)
        yield from _drain(1, together, rows, pieces)
        return
    groups, rest = divmod(rows, together)
    group = _static if batching == "static" else _drain
    yield from group(groups, together, together, pieces)
    if rest:
        yield from group(1, rest, rest, pieces)


def _full(rows: int, together: int, pieces: tuple[Piece, ...]) -> Iterator[Phase]:
    """Every place is taken, until what is left is one batch more; ages are those of a token in the mean."""
    mean = sum(piece.steps * piece.alive for piece in pieces)
    if rows > together and mean > 0:
        age = sum(piece.steps * piece.alive * piece.age for piece in pieces) / mean
        yield Phase((rows - together) / together * mean, together, age)


def _drain(groups: int, together: int, drawn: int, pieces: tuple[Piece, ...]) -> Iterator[Phase]:
    """``groups`` batches, one after the other, whose rows end and leave."""
    for piece in pieces:
        any_left = 1 - (1 - piece.alive) ** drawn
        yield Phase(groups * piece.steps * any_left, together * piece.alive / any_left, piece.age)


def _static(groups: int, together: int, drawn: int, pieces: tuple[Piece, ...]) -> Iterator[Phase]:
    """``groups`` batches, one after the other, whose ended rows stay until the longest has ended."""
    for piece in pieces:
        yield Phase(groups * piece.steps * (1 - (1 - piece.alive) ** drawn), together, piece.age)
