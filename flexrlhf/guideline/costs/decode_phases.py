"""Decoding steps of generation by the number of live rows.

Lengths are those of the rows, or a sample of their distribution: then a batch of ``rows`` has, after as many steps as a
share ``alive`` of the sample survives, ``rows * alive`` live rows on the average, and any at all with probability
``1 - (1 - alive) ** most``, where ``most`` rows could have been as long. Steps are not simulated one by one: lengths
are divided into few bins. If rows grow beyond the pages of a cache, which puts some of them back, some rows stand for
all of them, and are followed from one end or full cache to the next (``paged_decoding``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from heapq import heappop, heappush
from math import gcd, inf
from typing import NamedTuple

from flexrlhf.guideline.costs.cost_model import Call, Pages
from flexrlhf.guideline.costs.profiles import Batching

EVEN_BINS, TAIL_BINS = 14, 6
"""Bins of a large sample: the tail, which runs long and nearly alone, has one for each length."""
FOLLOWED = 256
"""Rows that stand for all rows of a full cache."""
MERGED = 0.1
"""Share by which the numbers of rows of two phases differ that are one."""


class DecodePhase(NamedTuple):
    """DecodeSteps steps with the same number of live rows.

    steps:  steps, on the average
    rows:   live rows
    age:    tokens of their responses so far
    """

    steps: float
    rows: float
    age: float


@dataclass(frozen=True)
class LengthBin:
    """DecodeSteps steps ``start`` to ``end``, which a share ``alive`` of the rows reaches."""

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


def decode_phases(
    batching: Batching,
    rows: int,
    together: int,
    responses: tuple[float, ...],
    is_exact: bool = False,
    replicas: int = 1,
) -> Iterator[DecodePhase]:
    """Yield the phases of decoding ``rows`` rows, at most ``together`` at once.

    is_exact:  whether ``responses`` are the lengths of these very rows.
    replicas:  with as many rows each, which wait for the longest of all.
    """
    together = max(1, min(rows, together))
    bins = length_bins(responses)
    if is_exact and rows == together:
        stays = batching == "static"
        yield from (DecodePhase(each.steps, rows * (1 if stays else each.alive), each.age) for each in bins)
        return
    if batching == "refill":
        yield from _full(rows, together, bins)
        yield from _shrinking(1, together, rows if is_exact else replicas * rows, bins)
        return
    groups, rest = divmod(rows, together)
    group = _static if batching == "static" else _shrinking
    if groups == 1 and not rest:
        yield from group(1, together, replicas * together, bins)
        return
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
        yield DecodePhase(groups * each.steps * any_left, max(1.0, together * each.alive / any_left), each.age)


def _static(groups: int, together: int, most: int, bins: tuple[LengthBin, ...]) -> Iterator[DecodePhase]:
    """Yield the phases of ``groups`` batches, one after the other, whose rows stay until the longest has ended."""
    for each in bins:
        yield DecodePhase(groups * each.steps * (1 - (1 - each.alive) ** most), together, each.age)


@dataclass(frozen=True)
class DecodeSteps:
    """Decoding of all rows of a call.

    phases:    steps by the number of live rows.
    repeats:   times that a row is put back, and its tokens computed again.
    repeated:  tokens that are computed again.
    """

    phases: tuple[DecodePhase, ...]
    repeats: float = 0.0
    repeated: float = 0.0


def decoding(call: Call, batching: Batching, replicas: int = 1) -> DecodeSteps:
    """Return the decoding of the rows of ``call`` on the replica, of ``replicas``, with the longest response."""
    pages, phases = call.pages, partial(decode_phases, batching, call.rows)
    if pages is None:
        return DecodeSteps(tuple(phases(call.decode_rows, call.responses, call.is_exact, replicas)))
    most, prompt = min(call.rows, pages.most_rows), call.prompt / call.prompt_samples
    longest = max((each.alive * (prompt + each.end) for each in length_bins(call.responses)), default=0.0)
    if most * longest > pages.tokens or call.rows > most > pages.rows(prompt, call.responses):
        return paged_decoding(call.rows, pages, prompt + pages.partly_filled, call.responses)
    return DecodeSteps(tuple(phases(most, call.responses, call.is_exact, replicas)))


@dataclass
class _Cache:
    """Rows in a cache, all of which grow by a token in every step, and rows that wait for pages.

    lengths:  of all rows.
    prompt:   tokens of a row's prompt in the cache.
    pages:    of the cache.
    live:     row → step at which its response was empty, in the order in which they were admitted.
    ends:     (step, row), also of rows that were put back.
    waiting:  (row, tokens of its response so far).
    """

    lengths: Sequence[float]
    prompt: float
    pages: Pages
    live: dict[int, float] = field(default_factory=dict)
    ends: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    step: float = 0.0
    used: float = 0.0
    repeats: int = 0
    repeated: float = 0.0

    def follow(self) -> Iterator[DecodePhase]:
        """Yield the phases from one change of the live rows to the next."""
        while self.waiting or self.live:
            self._admit()
            end, row = self._next_end()
            full = self.step + max(0.0, self.pages.tokens - self.used) / len(self.live)
            ages = self.used - len(self.live) * self.prompt
            steps = min(end, full) - self.step
            if steps > 0:
                yield DecodePhase(steps, len(self.live), ages / len(self.live) + steps / 2)
            self.step, self.used = self.step + steps, self.used + steps * len(self.live)
            if end <= full or len(self.live) == 1:
                if end > full:
                    # one row always goes on: its pages are the cache
                    yield DecodePhase(end - full, 1, self.lengths[row] - (end - full) / 2)
                    self.step = end
                self.used = self.used - self.prompt - self.lengths[row] if len(self.live) > 1 else 0.0
                del self.live[row]
            else:
                self._put_back()

    def _admit(self) -> None:
        while self.waiting and len(self.live) < self.pages.most_rows:
            row, tokens = self.waiting[0]
            free = self.pages.tokens * (1 - self.pages.kept_free * bool(self.live))
            if self.live and self.used + self.prompt + tokens > free:
                break
            self.waiting.popleft()
            self.live[row] = self.step - tokens
            self.used += self.prompt + tokens
            heappush(self.ends, (self.live[row] + self.lengths[row], row))
            if tokens:
                self.repeats += 1
                self.repeated += self.prompt + tokens

    def _next_end(self) -> tuple[float, int]:
        while True:
            end, row = self.ends[0]
            if self.live.get(row, -inf) + self.lengths[row] == end:
                return end, row
            heappop(self.ends)

    def _put_back(self) -> None:
        """Put back the row that was admitted last."""
        row, began = self.live.popitem()
        self.used -= self.prompt + self.step - began
        self.waiting.appendleft((row, self.step - began))


def paged_decoding(rows: int, pages: Pages, prompt: float, responses: tuple[float, ...]) -> DecodeSteps:
    """Return the decoding of ``rows`` rows whose keys and values outgrow the cache.

    ``prompt``: tokens of a row in the cache in addition to its response.
    """
    few = min(rows, FOLLOWED)
    scale = rows / few
    small = Pages(pages.tokens / scale, max(1, round(pages.most_rows / scale)), pages.kept_free)
    found = _followed(few, small, prompt, responses)
    phases = tuple(DecodePhase(each.steps, scale * each.rows, each.age) for each in found.phases)
    return DecodeSteps(phases, scale * found.repeats, scale * found.repeated)


@lru_cache(maxsize=1024)
def _followed(few: int, pages: Pages, prompt: float, responses: tuple[float, ...]) -> DecodeSteps:
    """Return the decoding of a few rows, one by one, in a cache of as much less."""
    ordered = sorted(max(1.0, length - 1) for length in responses)
    spread = [ordered[(2 * index + 1) * len(ordered) // (2 * few)] for index in range(few)]
    # an order that has little to do with length: every so many of them, a golden section
    stride = next(each for each in range(max(1, round(0.618 * few)), 2 * few + 1) if gcd(each, few) == 1)
    cache = _Cache([spread[index * stride % few] for index in range(few)], prompt, pages)
    cache.waiting.extend((row, 0.0) for row in range(few))
    return DecodeSteps(tuple(_merged(cache.follow())), cache.repeats, cache.repeated)


def _merged(phases: Iterator[DecodePhase]) -> Iterator[DecodePhase]:
    """Yield ``phases``, neighbours with nearly as many rows as one."""
    steps = live = tokens = first = 0.0
    for each in phases:
        if steps and abs(each.rows - first) > MERGED * first:
            yield DecodePhase(steps, live / steps, tokens / live)
            steps = live = tokens = 0.0
        first = first if steps else each.rows
        steps, live = steps + each.steps, live + each.steps * each.rows
        tokens += each.steps * each.rows * each.age
    if steps:
        yield DecodePhase(steps, live / steps, tokens / live)
