"""Many assignments at once, one a row: the bytes that they need, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flexrlhf.guideline.search.evaluate import CallGraph
from flexrlhf.guideline.search.problem import Assignment, Choice
from flexrlhf.guideline.search.tables import DISJOINT, OVERLAPPING, SAME, Bools, Floats, Ints, Tables
from flexrlhf.guideline.simulation.walk import SteadySteps, due_after, executions

ROUNDING = 1e-9
"""Relative difference below which two assignments take the same time; memory may be exceeded by as much."""
Overlaps = Mapping[tuple[int, int], "Bools | bool"]
"""Pair of parts (the smaller first) → whether they share a device: by row, or one value for all rows."""
Wait = Floats | float | None
"""Added to the end of an earlier call: 0 in rows that wait for it, minus infinity in others. None: no row waits."""


def assignment_of(tables: Tables, starts: Sequence[int], options: Sequence[int]) -> Assignment:
    """Return one row as an assignment."""
    return tuple(
        Choice(part.name, start, int(table.size[option]), table.options[option])
        for part, table, start, option in zip(tables.problem.parts, tables.parts, starts, options, strict=True)
    )


# --- meshes


def relations(start: Ints, size: Ints, other_start: Ints, other_size: Ints) -> Ints:
    """Return the relations of pairs of meshes, as indices of ``RELATIONS``."""
    shared = (start < other_start + other_size) & (other_start < start + size)
    same = (start == other_start) & (size == other_size)
    return np.where(same, SAME, np.where(shared, OVERLAPPING, DISJOINT))


def pairwise(starts: Ints, sizes: Ints, parts: Sequence[int]) -> Overlaps:
    """Return which meshes of ``parts`` overlap. ``starts``, ``sizes``: (n, len(parts))."""
    overlaps: dict[tuple[int, int], Bools | bool] = {}
    ends = starts + sizes
    for i, one in enumerate(parts):
        for j in range(i + 1, len(parts)):
            shared: Bools = (starts[:, i] < ends[:, j]) & (starts[:, j] < ends[:, i])
            pair = (min(one, parts[j]), max(one, parts[j]))
            overlaps[pair] = bool(shared[0]) if len(shared) and (shared == shared[0]).all() else shared
    return overlaps


# --- memory


def assignments_over(tables: Tables, starts: Ints, options: Ints) -> Floats:
    """Return ``most_over`` of whole assignments, (n,). ``starts``, ``options``: (n, parts)."""
    columns = list(enumerate(tables.parts))
    sizes = np.stack([part.size[options[:, p]] for p, part in columns], axis=1)
    resting = np.stack([part.resting[options[:, p]] for p, part in columns], axis=1)
    active = np.stack([part.active[options[:, p]] for p, part in columns], axis=1)
    return most_over(tables, starts, sizes, resting, active)


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


def assignment_seconds(tables: Tables, starts: Ints, options: Ints) -> Floats:
    """Return the time of a settled step of each row, (n,), whether or not it fits. The arguments are (n, parts)."""
    sizes = np.stack([part.size[options[:, p]] for p, part in enumerate(tables.parts)], axis=1)
    overlaps = pairwise(starts, sizes, range(len(tables.parts)))
    graph, zeros = tables.graph, np.zeros(len(options))
    seconds = [
        tables.parts[parts[0]].seconds[options[:, parts[0]], column] if column >= 0 else zeros
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    delays: list[Floats | float] = [0.0] * len(tables.links)
    ends = [part.end[options[:, p]] for p, part in enumerate(tables.parts)]
    related: dict[tuple[int, int], Ints] = {}
    for index, table in enumerate(tables.links):
        a, b = table.link.source, table.link.to
        if (a, b) not in related:
            related[a, b] = relations(starts[:, a], sizes[:, a], starts[:, b], sizes[:, b])
        taken = table.seconds(ends[a], ends[b], related[a, b])
        if table.link.call >= 0:
            seconds[table.link.call] = taken
        else:
            delays[index] = taken if taken.any() else 0.0
    return clock(graph, seconds, delays, overlaps, len(starts))


def clock(
    graph: CallGraph, seconds: Sequence[Floats], delays: Sequence[Floats | float], overlaps: Overlaps, rows: int
) -> Floats:
    """Return the time of a settled step of each row, (rows,): the walk of the simulation for many lists at once.

    It has the state of ``simulation.walk``, with parts in place of blocks: a call occupies all that share a device with
    its own.

    seconds:   of each call, (rows,).
    delays:    time of each link, (rows,), or 0.
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


def wait_of(parts: tuple[int, ...], others: tuple[int, ...], overlaps: Overlaps) -> Wait:
    """Return how a call of ``parts`` waits for a call of ``others``."""
    shared: Bools | bool = False
    for part in parts:
        for other in others:
            overlap = True if part == other else overlaps[min(part, other), max(part, other)]
            if overlap is True or shared is True:
                return 0.0
            shared = overlap if shared is False else shared | overlap
    return None if shared is False else np.where(shared, 0.0, -np.inf)


def _key_of(wait: Wait) -> object:
    """Return a key that is equal for waits that are the same."""
    return wait if wait is None or isinstance(wait, float) else id(wait)


def delay_to(start: Floats, end: Floats | None, wait: Wait) -> None:
    """Delay ``start``, in place, to ``end`` in the rows that wait for it."""
    if end is None or wait is None:
        return
    np.maximum(start, end if isinstance(wait, float) and wait == 0.0 else end + wait, out=start)
