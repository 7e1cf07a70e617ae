"""Many assignments at once, one a row: the mesh and the option of every part as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexrlhf.guideline.search.bounds import Overlaps, clock
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.problem import Assignment, Choice
from flexrlhf.guideline.search.tables import DISJOINT, OVERLAPPING, SAME, Bools, Ints, Tables

ROUNDING = 1e-9
"""Relative difference below which two assignments take the same time; memory may be exceeded by as much."""


def relations(start: Ints, size: Ints, other_start: Ints, other_size: Ints) -> Ints:
    """Relations of pairs of meshes, as indices of ``RELATIONS``."""
    shared = (start < other_start + other_size) & (other_start < start + size)
    same = (start == other_start) & (size == other_size)
    return np.where(same, SAME, np.where(shared, OVERLAPPING, DISJOINT))


def pairwise(starts: Ints, sizes: Ints, parts: Sequence[int]) -> Overlaps:
    """Overlaps between the meshes of ``parts``. ``starts``, ``sizes``: (n, len(parts))."""
    overlaps: dict[tuple[int, int], Bools | bool] = {}
    ends = starts + sizes
    for i, one in enumerate(parts):
        for j in range(i + 1, len(parts)):
            shared: Bools = (starts[:, i] < ends[:, j]) & (starts[:, j] < ends[:, i])
            pair = (min(one, parts[j]), max(one, parts[j]))
            overlaps[pair] = bool(shared[0]) if len(shared) and (shared == shared[0]).all() else shared
    return overlaps


def most_over(tables: Tables, starts: Ints, sizes: Ints, resting: Floats, active: Floats) -> Floats:
    """Bytes by which the fullest device of each row exceeds its memory, (n,); negative: it fits.

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
        np.maximum(worst, used + most - _memory(tables, point), out=worst)
    return worst


def _memory(tables: Tables, point: Ints) -> Floats:
    """Bytes of the devices ``point``, (n,)."""
    if tables.is_uniform:
        return np.full(len(point), tables.memory_at[0][1])
    firsts = np.array([first for first, _ in tables.memory_at])
    memory = np.array([size for _, size in tables.memory_at])
    return np.asarray(memory[np.searchsorted(firsts, point, side="right") - 1])


def rooms(tables: Tables, starts: Ints, sizes: Ints, resting: Floats) -> Floats:
    """Bytes that the others' ``resting`` leaves to each part on the fullest device of its mesh, (n, parts)."""
    room = np.full(starts.shape, np.inf)
    runs = [np.full(len(starts), first) for first, _ in tables.memory_at[1:]]
    for point in (*starts.T, *runs):
        covers = (starts <= point[:, None]) & (point[:, None] < starts + sizes)
        used = np.where(covers, resting, 0.0)
        left = _memory(tables, point)[:, None] - used.sum(axis=1, keepdims=True) + used
        room = np.minimum(room, np.where(covers, left, np.inf))
    return room


def fits(tables: Tables, over: Floats) -> Bools:
    """Whether ``over`` bytes too many are a matter of rounding, (n,)."""
    room = max(memory for _, memory in tables.memory_at)
    return np.asarray(over <= ROUNDING * room)


def assignment_seconds(tables: Tables, starts: Ints, options: Ints) -> Floats:
    """Seconds of a settled step of each row, whatever it needs of memory. ``starts``, ``options``: (n, parts)."""
    sizes = np.stack([part.size[options[:, p]] for p, part in enumerate(tables.parts)], axis=1)
    overlaps = pairwise(starts, sizes, range(len(tables.parts)))
    seconds, delays = call_seconds(tables, options)
    for index, table in enumerate(tables.links):
        a, b = table.link.source, table.link.to
        relation = relations(starts[:, a], sizes[:, a], starts[:, b], sizes[:, b])
        taken = table.seconds(table.source.end[options[:, a]], table.to.end[options[:, b]], relation)
        if table.link.call >= 0:
            seconds[table.link.call] = taken
        else:
            delays[index] = taken
    return clock(tables.graph, seconds, delays, overlaps, len(starts))


def call_seconds(tables: Tables, options: Ints) -> tuple[list[Floats], list[Floats]]:
    """Seconds of each call and delay of each link; only those of tasks are filled in, others are 0."""
    graph, zeros = tables.graph, np.zeros(len(options))
    seconds = [
        tables.parts[parts[0]].seconds[options[:, parts[0]], column] if column >= 0 else zeros
        for parts, column in zip(graph.parts, graph.column, strict=True)
    ]
    return seconds, [zeros] * len(tables.links)


def assignments_over(tables: Tables, starts: Ints, options: Ints) -> Floats:
    """``most_over`` of whole assignments. ``starts``, ``options``: (n, parts)."""
    columns = list(enumerate(tables.parts))
    sizes = np.stack([part.size[options[:, p]] for p, part in columns], axis=1)
    resting = np.stack([part.resting[options[:, p]] for p, part in columns], axis=1)
    active = np.stack([part.active[options[:, p]] for p, part in columns], axis=1)
    return most_over(tables, starts, sizes, resting, active)


def assignment_of(tables: Tables, starts: Sequence[int], options: Sequence[int]) -> Assignment:
    """Return one row as an assignment."""
    return tuple(
        Choice(part.name, start, int(table.size[option]), table.options[option])
        for part, table, start, option in zip(tables.problem.parts, tables.parts, starts, options, strict=True)
    )
