"""Many assignments at once: their seconds, and lower bounds on the seconds of any completion of a partial assignment.

A step cannot be shorter than any cycle of waits that comes back to where it began one step later: calls in list order
that share devices or read each other. It cannot be shorter than the work of all calls spread over all devices either,
nor than a call, then everything that must run between it and a second one spread over all devices, then the second one
and the way back (``Window``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flexrlhf.guideline.search.graph import CallGraph
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.tables import Bools
from flexrlhf.guideline.simulation.walk import SteadySteps, due_after, executions

Overlaps = Mapping[tuple[int, int], "Bools | bool"]
"""Pair of parts (the smaller first) → whether they share a device: by row, or one value for all rows."""
Wait = Floats | float | None
"""Added to the end of an earlier call: 0 in rows that wait for it, minus infinity in others. None: no row waits."""


def waits_of(graph: CallGraph, overlaps: Overlaps) -> list[list[Wait]]:
    """Wait of each call for each other call: 0 where they share a device, or the weights that the other brings."""
    calls = range(graph.num_calls)
    return [
        [0.0 if _awaits(graph, i, j) else _wait(graph.parts[i], graph.parts[j], overlaps) for j in calls] for i in calls
    ]


def _awaits(graph: CallGraph, call: int, other: int) -> bool:
    """Whether ``call`` uses the weights that ``other`` brings in the background, or brings some over the same link."""
    filled = graph.fills[other]
    return filled >= 0 and (filled in graph.parts[call] or graph.fills[call] >= 0)


def _wait(parts: tuple[int, ...], others: tuple[int, ...], overlaps: Overlaps) -> Wait:
    """Wait between a call of ``parts`` and a call of ``others``."""
    shared: Bools | bool = False
    for part in parts:
        for other in others:
            overlap = True if part == other else overlaps[min(part, other), max(part, other)]
            if overlap is True or shared is True:
                return 0.0
            shared = overlap if shared is False else shared | overlap
    if shared is False:
        return None
    return np.where(shared, 0.0, -np.inf)


def clock(
    graph: CallGraph, seconds: Sequence[Floats], delays: Sequence[Floats], overlaps: Overlaps, rows: int
) -> Floats:
    """Seconds of a settled step of each row, (rows,): the walk of the simulation for many lists at once.

    It has the state of ``simulation.walk``, with parts in place of blocks: a call occupies all that share a device with
    its own.

    seconds:   of each call, (rows,).
    delays:    seconds of each link, (rows,).
    overlaps:  which parts share a device.
    """
    steady = SteadySteps.of(graph.lags, graph.every)
    free, filled = ([np.zeros(rows) for _ in range(graph.num_parts)] for _ in range(2))
    done: dict[tuple[int, int], Floats] = {}
    link, ends = np.zeros(rows), [np.zeros(rows) for _ in range(steady.walked)]
    crowds = [_crowd(parts, graph.num_parts, overlaps) for parts in graph.parts]
    for call, step in executions(graph.lags, steady.walked, due_after(graph.every, steady.walked)):
        start = np.zeros(rows)
        for edge in graph.edges_to(call):
            _raise(start, done.get((step, edge.writer)), delays[edge.rows] if edge.rows >= 0 else 0.0)
        for part in graph.parts[call]:
            np.maximum(start, free[part], out=start)
            np.maximum(start, filled[part], out=start)
        if graph.fills[call] >= 0:
            np.maximum(start, link, out=start)
        done[step, call] = end = start + seconds[call]
        if graph.fills[call] >= 0:
            link = filled[graph.fills[call]] = end
        for part, wait in crowds[call]:
            _raise(free[part], end, wait)
        np.maximum(ends[step], end, out=ends[step])
    return np.asarray((ends[steady.last] - ends[steady.last - steady.measured]) / steady.measured)


def _crowd(parts: tuple[int, ...], num_parts: int, overlaps: Overlaps) -> list[tuple[int, Wait]]:
    """Return the parts that share a device with one of ``parts`` in some row, and how they wait for its calls."""
    waits = [(other, _wait(parts, (other,), overlaps)) for other in range(num_parts)]
    return [(other, wait) for other, wait in waits if wait is not None]


def _raise(start: Floats, end: Floats | None, wait: Wait) -> None:
    """Delay ``start``, in place, to ``end`` in the rows that wait for it."""
    if end is None or wait is None:
        return
    np.maximum(start, end if isinstance(wait, float) and wait == 0.0 else end + wait, out=start)


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
    """Lower bound on the seconds of a step of each row, (rows,): the longest cycle of waits over the steps it spans.

    ``areas``: window → device seconds of the calls in between, over the number of devices.
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
"""Call → the longest way from the start of a first call to its end, (rows,)."""


@dataclass(frozen=True, eq=False)
class _Waits:
    """Longest paths through relaxed steps. Calls that are not due in every step are left out: no cycle gets longer.

    graph:    the calls.
    seconds:  of each call.
    delays:   seconds of each link.
    waits:    wait of each call for each other call.
    rows:     number of rows.
    """

    graph: CallGraph
    seconds: Sequence[Floats | float]
    delays: Sequence[Floats | float]
    waits: Sequence[Sequence[Wait]]
    rows: int

    @property
    def calls(self) -> list[int]:
        return [call for call in range(self.graph.num_calls) if self.graph.every[call] == 1]

    def start(self, call: int, before: Paths, now: Paths) -> Floats:
        """Start of a call, after the calls of the turn ``before`` and of its own."""
        start = np.full(self.rows, -np.inf)
        for other, end in (*before.items(), *now.items()):
            _raise(start, end, self.waits[call][other])
        for edge in self.graph.edges_to(call):
            if edge.turns <= 1:
                written = (before if edge.turns else now).get(edge.writer)
                _raise(start, written, self.delays[edge.rows] if edge.rows >= 0 else 0.0)
        return start

    def paths_from(self, first: int) -> Paths:
        """Longest paths from the start of ``first`` to the ends of the later calls of the same turn."""
        paths = {first: np.zeros(self.rows) + self.seconds[first]}
        for call in self.calls:
            if call > first:
                paths[call] = self.start(call, {}, paths) + self.seconds[call]
        return paths

    def back(self, paths: Paths, first: int) -> Floats:
        """Longest of ``paths`` to a call that ``first`` waits for in the next turn."""
        return self.start(first, paths, {})

    def long_cycle(self, paths: Paths, first: int) -> Floats:
        """Longest path from ``first`` back to it ``lag`` + 1 turns later, over those turns: through what it reads of
        earlier turns."""
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
