"""Longest cycles of waits: a lower bound on the time of a step.

A step cannot be shorter than any cycle of waits that comes back to where it began one step later: calls in list order
that share devices or read each other. It cannot be shorter either than a call, then everything that must run between it
and a second one spread over all devices, then the second one and the way back (``Window``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import combinations_with_replacement
from operator import itemgetter, or_
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.search.assignments import Overlaps, RowWait, delay_to, wait_of
from flexrlhf.guideline.search.evaluate import CallGraph
from flexrlhf.guideline.search.part_table import Floats

N = TypeVar("N", np.float64, np.bool_)
T = TypeVar("T", float, bool)
AT_ONCE = 4096
"""Rows whose cycles are computed at once: the ways of more are no longer near a core."""


@dataclass(frozen=True)
class Window:
    """Two calls, and the calls ``between`` that begin after ``first`` ends and end before ``last`` begins."""

    first: int
    last: int
    between: tuple[int, ...]


def windows_of(graph: CallGraph) -> tuple[Window, ...]:
    """Windows around calls of at least two parts that no other window contains."""
    after = _orders(graph)
    windows = []
    for first in range(graph.num_calls):
        for last in sorted(after[first]):
            between = tuple(k for k in sorted(after[first]) if last in after[k] and graph.column[k] >= 0)
            if len({graph.parts[k] for k in between}) > 1:
                windows.append(Window(first, last, between))
    return tuple(w for w in windows if not any(set(w.between) < set(other.between) for other in windows))


def _orders(graph: CallGraph) -> list[set[int]]:
    """Calls of the same turn that come after each call under every placement."""
    after: list[set[int]] = [set() for _ in range(graph.num_calls)]
    reads = {(edge.writer, edge.reader) for edge in graph.edges if edge.turns == 0}
    for call in reversed(range(graph.num_calls)):
        for later in range(call + 1, graph.num_calls):
            if graph.every[call] == graph.every[later] == 1 and (
                (call, later) in reads or set(graph.parts[call]) & set(graph.parts[later])
            ):
                after[call] |= {later, *after[later]}
    return after


def cycle_bound(
    graph: CallGraph,
    seconds: Sequence[Floats | float],
    delays: Sequence[Floats | float],
    overlaps: Overlaps,
    rows: int,
    areas: Mapping[Window, Floats | float],
) -> Floats:
    """Lower bound on the time of a step of each row, (rows,): the longest cycle of waits over the steps it spans.

    ``areas``: window → device time of the calls in between, over the number of devices.
    """
    if rows <= AT_ONCE:
        return _Cycles(graph, seconds, delays, _waits_of(graph, overlaps), rows).longest(areas)
    pieces = [slice(at, min(at + AT_ONCE, rows)) for at in range(0, rows, AT_ONCE)]
    bounds = [
        cycle_bound(
            graph,
            [_in(piece, each) for each in seconds],
            [_in(piece, each) for each in delays],
            {pair: _in(piece, each) for pair, each in overlaps.items()},
            piece.stop - piece.start,
            {window: _in(piece, area) for window, area in areas.items()},
        )
        for piece in pieces
    ]
    return np.concatenate(bounds)


def _in(piece: slice, values: NDArray[N] | T) -> NDArray[N] | T:
    """Return the values of the rows of a piece; one for all rows as it is."""
    return values[piece] if isinstance(values, np.ndarray) and len(values) > 1 else values


def _waits_of(graph: CallGraph, overlaps: Overlaps) -> list[list[RowWait]]:
    """Return the wait of each call for each other: where they share a device, and for weights in the background by the
    calls that use them and by the next ones on their link."""
    of_parts: dict[tuple[tuple[int, ...], tuple[int, ...]], RowWait] = {}
    for parts, others in combinations_with_replacement(dict.fromkeys(graph.parts), 2):
        of_parts[parts, others] = of_parts[others, parts] = wait_of(parts, others, overlaps)
    waits = [[of_parts[parts, others] for others in graph.parts] for parts in graph.parts]
    for other, filled in enumerate(graph.fills):
        for call, parts in enumerate(graph.parts):
            if filled >= 0 and (filled in parts or graph.fills[call] >= 0):
                waits[call][other] = 0.0
    return waits


@dataclass(frozen=True, eq=False)
class _Cycles:
    """Longest paths through relaxed steps. Calls that are not due in every step are left out: no cycle gets longer.

    graph:    the calls.
    seconds:  of each call.
    delays:   time of each link.
    waits:    wait of each call for each other call.
    rows:     number of rows.
    """

    graph: CallGraph
    seconds: Sequence[Floats | float]
    delays: Sequence[Floats | float]
    waits: Sequence[Sequence[RowWait]]
    rows: int

    @cached_property
    def calls(self) -> list[int]:
        """The calls that are due, in order."""
        return [call for call in range(self.graph.num_calls) if self.graph.every[call] == 1]

    @cached_property
    def edges(self) -> tuple[list[list[tuple[int, Floats | float]]], ...]:
        """(place of the writer, delay) of what each call reads of the same turn, and of the one before."""
        place = {call: at for at, call in enumerate(self.calls)}
        edges: tuple[list[list[tuple[int, Floats | float]]], ...] = ([[] for _ in place], [[] for _ in place])
        for edge in self.graph.edges:
            if edge.turns <= 1 and edge.reader in place and edge.writer in place:
                delay = self.delays[edge.rows] if edge.rows >= 0 else 0.0
                edges[edge.turns][place[edge.reader]].append((place[edge.writer], delay))
        return edges

    @cached_property
    def ended(self) -> list[int]:
        """Bits of the calls that have ended, in every row, before the call at each place of the same turn begins."""
        ended: list[int] = []
        for at, call in enumerate(self.calls):
            writers = [writer for writer, _ in self.edges[0][at]]
            writers += [place for place in range(at) if isinstance(self.waits[call][self.calls[place]], float)]
            ended.append(_any_bit(1 << writer | ended[writer] for writer in writers))
        return ended

    @cached_property
    def ended_before(self) -> list[int]:
        """Bits of the calls of the turn before that have ended, in every row, before the call at each place begins."""
        ended: list[int] = []
        for at, call in enumerate(self.calls):
            writers = [writer for writer, _ in self.edges[1][at]]
            writers += [place for place, other in enumerate(self.calls) if isinstance(self.waits[call][other], float)]
            own = _any_bit(1 << writer | self.ended[writer] for writer in writers)
            ended.append(own | self._before_others(at, ended))
        return ended

    def _before_others(self, at: int, ended: Sequence[int]) -> int:
        """Return the bits in ``ended`` of the calls of the same turn that have ended before the one at a place."""
        return _any_bit(mine for place, mine in enumerate(ended[:at]) if self.ended[at] >> place & 1)

    def _waits(self, at: int, turns: int, ended: int) -> list[tuple[int, RowWait]]:
        """Return the (place, wait or delay) of the calls of ``turns`` before that may delay the call at a place.

        One that has ended before another begins delays nothing that waits for the other. ``ended``: bits of such ones.
        """
        found: list[tuple[int, RowWait]] = []
        for writer, delay in sorted(self.edges[turns][at], key=itemgetter(0), reverse=True):
            if not isinstance(delay, float) or delay or not ended >> writer & 1:
                found.append((writer, delay))
                ended |= 1 << writer | self.ended[writer]
        waits = self.waits[self.calls[at]]
        for place in reversed(range(len(self.calls) if turns else at)):
            wait = waits[self.calls[place]]
            if wait is not None and not ended >> place & 1:
                found.append((place, wait))
                if isinstance(wait, float):
                    ended |= 1 << place | self.ended[place]
        return found

    @cached_property
    def same_turn(self) -> list[list[tuple[int, RowWait]]]:
        """Waits of each call for those of the same turn."""
        return [self._waits(at, 0, 0) for at in range(len(self.calls))]

    @cached_property
    def last_turn(self) -> list[list[tuple[int, RowWait]]]:
        """Waits of each call for those of the turn before."""
        return [self._waits(at, 1, 0) for at in range(len(self.calls))]

    @cached_property
    def last_turn_after_same(self) -> list[list[tuple[int, RowWait]]]:
        """Waits of each call for those of the turn before, next to those of the same turn."""
        return [self._waits(at, 1, self._before_others(at, self.ended_before)) for at in range(len(self.calls))]

    def longest(self, areas: Mapping[Window, Floats | float]) -> Floats:
        """Longest cycle of each row, over the steps it spans, (rows,)."""
        ends, bound = self.ends, np.zeros(self.rows)
        for first, waits in enumerate(self.last_turn):
            for place, wait in waits:
                if place >= first:
                    delay_to(bound, ends[place][first], wait)
        for window, area in areas.items():
            first, last = self.calls.index(window.first), self.calls.index(window.last)
            before = [end[last] if at >= last else None for at, end in enumerate(ends)]
            start = self.start(first, before, [])
            np.maximum(bound, self.seconds[window.first] + area + start, out=bound)
        for cycle in self.long_cycles():
            np.maximum(bound, cycle, out=bound)
        return bound

    @cached_property
    def ends(self) -> list[Floats]:
        """Longest ways from the start of each call up to a call to the end of it, (calls up to it, rows), by call."""
        ends: list[Floats] = []
        for at, call in enumerate(self.calls):
            ways = np.full((at + 1, self.rows), -np.inf)
            for place, wait in self.same_turn[at]:
                delay_to(ways[: place + 1], ends[place], wait)
            ways += self.seconds[call]
            ways[at] = self.seconds[call]
            ends.append(ways)
        return ends

    def start(self, at: int, before: Sequence[Floats | None], now: Sequence[Floats]) -> Floats:
        """Start of the call at a place, after the ends of the turn ``before``, by call, and of the first of its own, up
        to it if there are any."""
        shape = next(end.shape for end in before if end is not None)
        start = np.full(shape, -np.inf)
        for place, wait in self.last_turn_after_same[at] if now else self.last_turn[at]:
            delay_to(start, before[place], wait)
        for place, wait in self.same_turn[at] if now else ():
            delay_to(start, now[place], wait)
        return start

    def long_cycles(self) -> Iterator[Floats]:
        """Yield the longest path from a call back to it ``lag`` + 1 turns later, over those turns, of each that reads
        an earlier turn."""
        due = {edge.reader for edge in self.graph.edges if edge.turns}
        firsts = [at for at, call in enumerate(self.calls) if call in due]
        before = [np.full((len(firsts), self.rows), -np.inf) for _ in self.calls if firsts]
        for number, first in enumerate(firsts):
            for at in range(first, len(self.calls)):
                before[at][number] = self.ends[at][first]
        for _ in range(self.graph.lag if firsts else 0):
            before = self._turn(before, len(self.calls))
        now = self._turn(before, max(firsts, default=0))
        for number, first in enumerate(firsts):
            ends = [[end[number] for end in turn] for turn in (before, now[:first])]
            yield self.start(first, *ends) / (self.graph.lag + 1)

    def _turn(self, before: Sequence[Floats], number: int) -> list[Floats]:
        """Return the ends of the first ``number`` calls of a turn, after the ends of the turn ``before``."""
        now: list[Floats] = []
        for at, call in enumerate(self.calls[:number]):
            now.append(self.start(at, before, now) + self.seconds[call])
        return now


def _any_bit(masks: Iterable[int]) -> int:
    """Return the bits of any of ``masks``."""
    return reduce(or_, masks, 0)
