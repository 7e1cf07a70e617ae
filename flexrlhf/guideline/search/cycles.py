"""Longest cycles of waits: a lower bound on the time of a step.

A step cannot be shorter than any cycle of waits that comes back to where it began one step later: calls in list order
that share devices or read each other. It cannot be shorter either than a call, then everything that must run between it
and a second one spread over all devices, then the second one and the way back (``Window``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np

from flexrlhf.guideline.search.assignments import Overlaps, Wait, delay_to, key_of, wait_of
from flexrlhf.guideline.search.evaluate import CallGraph
from flexrlhf.guideline.search.part_table import Floats


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
    return _Cycles(graph, seconds, delays, _waits_of(graph, overlaps), rows).longest(areas)


def _waits_of(graph: CallGraph, overlaps: Overlaps) -> list[list[Wait]]:
    """Return the wait of each call for each other: where they share a device, and for weights in the background by the
    calls that use them and by the next ones on their link."""
    of_parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Wait] = {}
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
    waits: Sequence[Sequence[Wait]]
    rows: int

    @cached_property
    def calls(self) -> list[int]:
        """The calls that are due, in order."""
        return [call for call in range(self.graph.num_calls) if self.graph.every[call] == 1]

    @cached_property
    def edges(self) -> list[tuple[int, int, int, Floats | float]]:
        """(place of the reader, of the writer, turns, delay) of the waits for results of the same turn or the last."""
        place = {call: at for at, call in enumerate(self.calls)}
        return [
            (place[edge.reader], place[edge.writer], edge.turns, self.delays[edge.rows] if edge.rows >= 0 else 0.0)
            for edge in self.graph.edges
            if edge.turns <= 1 and edge.reader in place and edge.writer in place
        ]

    def longest(self, areas: Mapping[Window, Floats | float]) -> Floats:
        """Longest cycle of each row, over the steps it spans, (rows,)."""
        ends, bound = self.ends, np.zeros(self.rows)
        for at, (call, end) in enumerate(zip(self.calls, ends, strict=True)):
            # of the ways that wait alike, the longest
            alike: dict[object, tuple[Wait, list[int]]] = {}
            for first, other in enumerate(self.calls[: at + 1]):
                wait = self.waits[other][call]
                alike.setdefault(key_of(wait), (wait, []))[1].append(first)
            for wait, firsts in alike.values():
                if wait is not None:
                    delay_to(bound, (end if len(firsts) == len(end) else end[firsts]).max(axis=0), wait)
        for reader, writer, turns, delay in self.edges:
            if turns and writer >= reader:
                delay_to(bound, ends[writer][reader], delay)
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
            for before, end in enumerate(ends):
                delay_to(ways[: before + 1], end, self.waits[call][self.calls[before]])
            for reader, writer, turns, delay in self.edges:
                if reader == at and not turns:
                    delay_to(ways[: writer + 1], ends[writer], delay)
            ways += self.seconds[call]
            ways[at] = self.seconds[call]
            ends.append(ways)
        return ends

    def start(self, at: int, before: Sequence[Floats | None], now: Sequence[Floats | None]) -> Floats:
        """Start of the call at a place, after the ends of the turn ``before``, by call, and of the first of its own."""
        shape = next((end.shape for end in (*before, *now) if end is not None), (self.rows,))
        start, waits = np.full(shape, -np.inf), self.waits[self.calls[at]]
        for ends in (before, now):
            for other, end in zip(self.calls, ends, strict=False):
                delay_to(start, end, waits[other])
        for reader, writer, turns, delay in self.edges:
            if reader == at and (turns or writer < len(now)):
                delay_to(start, before[writer] if turns else now[writer], delay)
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
