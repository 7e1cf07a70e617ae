"""Many assignments at once, one a row: the bytes that they need, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flexrlhf.guideline.search.evaluate import CallGraph
from flexrlhf.guideline.search.part_table import Bools, Floats, Ints
from flexrlhf.guideline.search.problem import Assignment, Choice
from flexrlhf.guideline.search.tables import DISJOINT, OVERLAPPING, SAME, Tables
from flexrlhf.guideline.simulation.walk import SteadySteps, due_after, executions

ROUNDING = 1e-9
"""Relative difference below which two assignments take the same time; memory may be exceeded by as much."""
Overlaps = Mapping[tuple[int, int], "Bools | bool"]
"""Pair of parts (the smaller first) → whether they share a device: by row, or one value for all rows."""
PartColumns = Sequence["Ints | int"]
"""A value of each part: by row, or one for all rows."""
Spot = tuple[int, int]
"""A part's start and the position of its option."""
AssignmentKey = tuple[tuple[int, ...], tuple[int, ...]]
"""Starts and options of an assignment."""
RowWait = Floats | float | None
"""Added to the end of an earlier call: 0 in rows that wait for it, minus infinity in others. None: no row waits."""


def assignment_of(tables: Tables, starts: Sequence[int], options: Sequence[int]) -> Assignment:
    """Return one row as an assignment."""
    return tuple(
        Choice(part.name, start, int(table.size[option]), table.options[option])
        for part, table, start, option in zip(tables.problem.parts, tables.parts, starts, options, strict=True)
    )


@dataclass(frozen=True, eq=False)
class WholeAssignments:
    """Assignments of ``tables``. ``starts``, ``options``: (n, parts)."""

    tables: Tables
    starts: Ints
    options: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def key(self, row: int) -> AssignmentKey:
        """Return the starts and the options of an assignment."""
        return tuple(self.starts[row].tolist()), tuple(self.options[row].tolist())

    def totals(self) -> Floats:
        """Return the time of all calls of each assignment together, (n,)."""
        totals = np.zeros(len(self))
        for part, table in enumerate(self.tables.parts):
            totals += table.total[self.options[:, part]]
        return totals

    def seconds(self, rows: Ints) -> Floats:
        """Return the time of a settled step of each of ``rows``, (len(rows),), whether or not it fits."""
        return columns_seconds(self.tables, [*self.starts[rows].T], [*self.options[rows].T], len(rows))

    def over(self) -> Floats:
        """Return ``most_over`` of each, (n,)."""
        columns = list(enumerate(self.tables.parts))
        sizes = np.stack([part.size[self.options[:, p]] for p, part in columns], axis=1)
        resting = np.stack([part.resting[self.options[:, p]] for p, part in columns], axis=1)
        active = np.stack([part.active[self.options[:, p]] for p, part in columns], axis=1)
        return most_over(self.tables, self.starts, sizes, resting, active)


# --- meshes


def relations(start: Ints | int, size: Ints | int, other_start: Ints | int, other_size: Ints | int) -> Ints:
    """Return the relations of pairs of meshes, as indices of ``RELATIONS``."""
    shared = (start < other_start + other_size) & (other_start < start + size)
    same = (start == other_start) & (size == other_size)
    return np.where(same, SAME, np.where(shared, OVERLAPPING, DISJOINT))


def pairwise(starts: PartColumns, sizes: PartColumns, parts: Sequence[int]) -> Overlaps:
    """Return which meshes of ``parts`` overlap. ``starts``, ``sizes``: of each part."""
    overlaps: dict[tuple[int, int], Bools | bool] = {}
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    for i, one in enumerate(parts):
        for j in range(i + 1, len(parts)):
            shared: Bools | bool = (starts[i] < ends[j]) & (starts[j] < ends[i])
            if not isinstance(shared, bool) and len(shared) and (shared == shared[0]).all():
                shared = bool(shared[0])
            overlaps[min(one, parts[j]), max(one, parts[j])] = shared
    return overlaps


# --- memory


def most_over(tables: Tables, starts: Ints, sizes: Ints, resting: Floats, active: Floats) -> Floats:
    """Return the bytes by which the fullest device of each row exceeds its memory, (n,); negative: it fits.

    All arguments are (n, parts). Parts that share a device all have the first device of one of them, or the first of
    its run of alike devices.
    """
    worst = np.full(len(starts), -np.inf)
    first, end = np.ascontiguousarray(starts.T), np.ascontiguousarray((starts + sizes).T)
    resting, active = np.ascontiguousarray(resting.T), np.ascontiguousarray(active.T)
    runs = [np.full(len(starts), run) for run, _ in tables.memory_at[1:]]
    for point in (*first, *runs):
        used, most = np.zeros(len(starts)), np.zeros(len(starts))
        for part in range(len(first)):
            covers = (first[part] <= point) & (point < end[part])
            used += covers * resting[part]
            np.maximum(most, covers * active[part], out=most)
        np.maximum(worst, used + most - tables.memory_on(point), out=worst)
    return worst


def rooms(tables: Tables, starts: Ints, sizes: Ints, resting: Floats) -> Floats:
    """Return the bytes that the others leave to each part on the fullest device of its mesh, (n, parts)."""
    room = np.full(starts.shape, np.inf)
    runs = [np.full(len(starts), first) for first, _ in tables.memory_at[1:]]
    for point in (*starts.T, *runs):
        covers = (starts <= point[:, None]) & (point[:, None] < starts + sizes)
        used = np.where(covers, resting, 0.0)
        left = tables.memory_on(point)[:, None] - used.sum(axis=1, keepdims=True) + used
        room = np.minimum(room, np.where(covers, left, np.inf))
    return room


def fits(tables: Tables, over: Floats) -> Bools:
    """Whether ``over`` bytes too many are a matter of rounding, (n,)."""
    return np.asarray(over <= ROUNDING * tables.most_memory)


# --- seconds


def columns_seconds(tables: Tables, starts: PartColumns, options: PartColumns, rows: int) -> Floats:
    """Return the time of a settled step of each row, (rows,). ``starts``, ``options``: of each part."""
    sizes = [_of_rows(part.size, option) for part, option in zip(tables.parts, options, strict=True)]
    overlaps = pairwise(starts, sizes, range(len(tables.parts)))
    graph = tables.graph
    seconds: list[Floats | float] = [
        tables.parts[parts[0]].seconds[options[parts[0]], column] if column >= 0 else 0.0
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    delays: list[Floats | float] = [0.0] * len(tables.links)
    ends = [_of_rows(part.end, option) for part, option in zip(tables.parts, options, strict=True)]
    related: dict[tuple[int, int], Ints] = {}
    for index, table in enumerate(tables.links):
        a, b = table.link.source, table.link.to
        if (a, b) not in related:
            related[a, b] = relations(starts[a], sizes[a], starts[b], sizes[b])
        taken = table.seconds(ends[a], ends[b], related[a, b])
        if table.link.call >= 0:
            seconds[table.link.call] = taken
        else:
            delays[index] = taken if taken.any() else 0.0
    return clock(graph, seconds, delays, overlaps, rows)


def _of_rows(values: Ints, rows: Ints | int) -> Ints | int:
    """Return the values of ``rows``: one as a number."""
    return int(values[rows]) if isinstance(rows, int) else values[rows]


def clock(
    graph: CallGraph, seconds: Sequence[Floats | float], delays: Sequence[Floats | float], overlaps: Overlaps, rows: int
) -> Floats:
    """Return the time of a settled step of each row, (rows,): the walk of the simulation for many lists at once.

    It has the state of ``simulation.walk``, with parts in place of blocks: a call occupies all that share a device with
    its own.

    seconds:   of each call, (rows,), or one for all rows.
    delays:    time of each link, (rows,), or one for all rows.
    overlaps:  which parts share a device.
    """
    steady = SteadySteps.of(graph.lags, graph.every)
    waits = {
        parts: [wait_of(parts, (other,), overlaps) for other in range(graph.num_parts)] for parts in set(graph.parts)
    }
    # parts for which the same calls wait are free at the same time
    alike: dict[object, Floats] = {}
    free = [
        alike.setdefault(tuple(_key_of(each[part]) for each in waits.values()), np.zeros(rows))
        for part in range(graph.num_parts)
    ]
    filled = [np.zeros(rows) for _ in range(graph.num_parts)]
    done: dict[tuple[int, int], Floats] = {}
    link, ends = np.zeros(rows), [np.zeros(rows) for _ in range(steady.walked)]
    occupied = {
        parts: [*{id(free[other]): (free[other], wait) for other, wait in enumerate(each) if wait is not None}.values()]
        for parts, each in waits.items()
    }
    for call, step in executions(graph.lags, steady.walked, due_after(graph.every, steady.walked)):
        start = np.zeros(rows)
        for edge in graph.edges_to[call]:
            delay_to(start, done.get((step, edge.writer)), delays[edge.rows] if edge.rows >= 0 else 0.0)
        for part in graph.parts[call]:
            np.maximum(start, free[part], out=start)
            np.maximum(start, filled[part], out=start)
        if graph.fills[call] >= 0:
            np.maximum(start, link, out=start)
        done[step, call] = end = start + seconds[call]
        if graph.fills[call] >= 0:
            link = filled[graph.fills[call]] = end
        for until, wait in occupied[graph.parts[call]]:
            delay_to(until, end, wait)
        np.maximum(ends[step], end, out=ends[step])
    return np.asarray((ends[steady.last] - ends[steady.last - steady.measured]) / steady.measured)


def wait_of(parts: tuple[int, ...], others: tuple[int, ...], overlaps: Overlaps) -> RowWait:
    """Return how a call of ``parts`` waits for a call of ``others``."""
    shared: Bools | bool = False
    for part in parts:
        for other in others:
            overlap = True if part == other else overlaps[min(part, other), max(part, other)]
            if overlap is True or shared is True:
                return 0.0
            shared = overlap if shared is False else shared | overlap
    return None if shared is False else np.where(shared, 0.0, -np.inf)


def _key_of(wait: RowWait) -> object:
    """Return a key that is equal for waits that are the same."""
    return wait if wait is None or isinstance(wait, float) else id(wait)


def delay_to(start: Floats, end: Floats | None, wait: RowWait) -> None:
    """Delay ``start``, in place, to ``end`` in the rows that wait for it."""
    if end is None or wait is None:
        return
    np.maximum(start, end if isinstance(wait, float) and wait == 0.0 else end + wait, out=start)
