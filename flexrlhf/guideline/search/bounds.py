"""Many plans at once: their seconds by the clock, and bounds on what any completion of a part of a plan can reach.

A step cannot be shorter than any cycle of waits that comes back to where it began one step later: calls in list order
that share devices or read each other. It cannot be shorter than the work of all calls spread over all devices either,
nor than a call, then everything that must lie between it and a second one spread over all devices, then the second one
and the way back (``Window``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flexrlhf.guideline.search.evaluate import measured, num_steps
from flexrlhf.guideline.search.graph import Graph
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.tables import Bools

Overlaps = Mapping[tuple[int, int], "Bools | bool"]
"""By pair of parts (the smaller first), whether they share a device: in each row, or in all alike."""
Wait = Floats | float | None
"""Added to the end of an earlier call: 0 where it is waited for, minus infinity where not. None: nowhere."""


def waits_of(graph: Graph, overlaps: Overlaps) -> list[list[Wait]]:
    """By two calls: 0 where they share a device."""
    calls = range(graph.num_calls)
    return [[_wait(graph.parts[i], graph.parts[j], overlaps) for j in calls] for i in calls]


def _wait(parts: tuple[int, ...], others: tuple[int, ...], overlaps: Overlaps) -> Wait:
    shared: Bools | bool = False
    for part in parts:
        for other in others:
            one = True if part == other else overlaps[min(part, other), max(part, other)]
            if one is True or shared is True:
                return 0.0
            shared = one if shared is False else shared | one
    if shared is False:
        return None
    return np.where(shared, 0.0, -np.inf)


def clock(graph: Graph, seconds: Sequence[Floats], delays: Sequence[Floats], overlaps: Overlaps, rows: int) -> Floats:
    """Seconds of a settled step of each row: ``play`` on arrays."""
    waits = waits_of(graph, overlaps)
    steps = num_steps(graph)
    last: list[Floats | None] = [None] * graph.num_calls
    ends: list[Floats] = [np.zeros(rows) for _ in range(steps)]
    ready: dict[tuple[int, int], Floats] = {}
    for turn in range(steps + graph.lag):
        for call in range(graph.num_calls):
            step = turn - graph.lags[call]
            if not 0 <= step < steps or (step + 1) % graph.every[call]:
                continue
            start = np.zeros(rows)
            for other, end in enumerate(last):
                _raise(start, end, waits[call][other])
            for edge in graph.edges_to(call):
                _raise(start, ready.get((step, edge.writer)), delays[edge.rows] if edge.rows >= 0 else 0.0)
            end = start + seconds[call]
            last[call] = ready[step, call] = end
            ends[step] = np.maximum(ends[step], end)
    batch, batches = measured(graph)
    return np.asarray((ends[batch] - ends[batch - batches]) / batches)


def _raise(start: Floats, end: Floats | None, wait: Wait) -> None:
    if end is None or wait is None:
        return
    np.maximum(start, end if isinstance(wait, float) and wait == 0.0 else end + wait, out=start)


@dataclass(frozen=True)
class Window:
    """All of ``between`` begin after ``first`` ends and end before ``last`` begins."""

    first: int
    last: int
    between: tuple[int, ...]


def windows_of(graph: Graph) -> tuple[Window, ...]:
    """Those that no other contains, around calls of two parts or more."""
    after = _orders(graph)
    found = []
    for first in range(graph.num_calls):
        for last in sorted(after[first]):
            between = tuple(k for k in sorted(after[first]) if last in after[k] and graph.column[k] >= 0)
            if len({graph.parts[k] for k in between}) > 1:
                found.append(Window(first, last, between))
    return tuple(w for w in found if not any(set(w.between) < set(other.between) for other in found))


def _orders(graph: Graph) -> list[set[int]]:
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
    graph: Graph,
    seconds: Sequence[Floats | float],
    delays: Sequence[Floats | float],
    overlaps: Overlaps,
    rows: int,
    areas: Mapping[Window, Floats | float],
) -> Floats:
    """The longest cycle of waits in each row, by the steps that it takes.

    ``areas``: device seconds between, over the number of devices.
    """
    waits = _Waits(graph, seconds, delays, waits_of(graph, overlaps), rows)
    reached: dict[int, Paths] = {}
    bound = np.zeros(rows)
    for first in reversed(waits.calls):
        reached[first] = waits.paths_from(first)
        np.maximum(bound, waits.back(reached[first], first), out=bound)
        for window, area in areas.items():
            if window.first == first:
                np.maximum(bound, seconds[first] + area + waits.back(reached[window.last], first), out=bound)
    for first in sorted({edge.reader for edge in graph.edges if edge.turns} & set(waits.calls)):
        np.maximum(bound, waits.long_cycle(reached[first], first), out=bound)
    return bound


Paths = dict[int, Floats]
"""By call, the longest way from the start of a first one to its end."""


@dataclass(frozen=True, eq=False)
class _Waits:
    """One relaxed step. Calls that are not due in every step are left out, which makes no cycle longer."""

    graph: Graph
    seconds: Sequence[Floats | float]
    delays: Sequence[Floats | float]
    waits: Sequence[Sequence[Wait]]
    rows: int

    @property
    def calls(self) -> list[int]:
        return [call for call in range(self.graph.num_calls) if self.graph.every[call] == 1]

    def start(self, call: int, before: Paths, now: Paths) -> Floats:
        """When a call begins, after those of the turn ``before`` and of its own."""
        start = np.full(self.rows, -np.inf)
        for other, end in (*before.items(), *now.items()):
            _raise(start, end, self.waits[call][other])
        for edge in self.graph.edges_to(call):
            if edge.turns <= 1:
                there = (before if edge.turns else now).get(edge.writer)
                _raise(start, there, self.delays[edge.rows] if edge.rows >= 0 else 0.0)
        return start

    def paths_from(self, first: int) -> Paths:
        """To the later calls of the same turn."""
        paths = {first: np.zeros(self.rows) + self.seconds[first]}
        for call in self.calls:
            if call > first:
                paths[call] = self.start(call, {}, paths) + self.seconds[call]
        return paths

    def back(self, paths: Paths, first: int) -> Floats:
        """The longest of ``paths`` for whose end ``first`` waits in the next turn."""
        return self.start(first, paths, {})

    def long_cycle(self, paths: Paths, first: int) -> Floats:
        """From ``first`` back to it ``lag`` + 1 turns later, a turn of it: through what it reads of earlier turns."""
        before = paths
        for _ in range(self.graph.lag):
            before = self._turn(before, self.calls)
        now = self._turn(before, [call for call in self.calls if call < first])
        return self.start(first, before, now) / (self.graph.lag + 1)

    def _turn(self, before: Paths, calls: Sequence[int]) -> Paths:
        now: Paths = {}
        for call in calls:
            now[call] = self.start(call, before, now) + self.seconds[call]
        return now
