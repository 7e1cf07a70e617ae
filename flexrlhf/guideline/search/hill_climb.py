"""Spots of parts: meshes and options, up to symmetry; first assignments, and hill climbing over one part at a time.

Two halves of an aligned block may be swapped when no mesh has an end inside the block: the swap maps the space and all
that is placed to itself. Parts are all distinct, so these swaps (and the cluster's mirror image) are all there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexrlhf.guideline.search.assignments import Spot
from flexrlhf.guideline.search.changes import PartChanges
from flexrlhf.guideline.search.part_table import Bools, Ints, PartTable
from flexrlhf.guideline.search.problem import Assignment, Option
from flexrlhf.guideline.search.result import SearchState
from flexrlhf.guideline.search.tables import Tables

Height = tuple[float, float]
"""Bytes that are lacking, then seconds: lower is better."""


@dataclass(eq=False)
class DistinctMeshes:
    """Meshes of a problem up to symmetry.

    tables:   the problem.
    fixed:    ends of meshes that are listed one by one, and borders between kinds: blocks around them never swap.
    mirrors:  whether the cluster may be mirrored.
    cache:    ends of placed meshes → (starts, shapes) that remain.
    """

    tables: Tables
    fixed: frozenset[int]
    mirrors: bool
    cache: dict[frozenset[int], tuple[Ints, Ints]] = field(default_factory=dict)

    def around(self, ends: Iterable[int]) -> tuple[Ints, Ints]:
        """(starts, shapes) of the meshes for a part, given the ends of the meshes of others."""
        key = frozenset(ends) - self.fixed
        meshes = self.cache.get(key)
        if meshes is None:
            meshes = self.cache[key] = self._distinct(key)
        return meshes

    def every(self) -> tuple[Ints, Ints]:
        """(starts, shapes) of all meshes."""
        shape_at = self.tables.shape_at
        starts = np.array([start for start, _ in shape_at], dtype=np.int64)
        return starts, np.array(list(shape_at.values()), dtype=np.int64)

    def _distinct(self, ends: frozenset[int]) -> tuple[Ints, Ints]:
        meshes = self.tables.problem.meshes
        uneven = _uneven_blocks(ends | self.fixed, self.tables.num_devices)
        distinct = dict.fromkeys(meshes.listed)
        for size in meshes.blocks:
            starts = {0} | {at for start, whole in uneven if whole >= 2 * size for at in (start, start + whole // 2)}
            distinct.update(dict.fromkeys((start, size) for start in sorted(starts)))
        shapes = [(start, self.tables.shape_at.get((start, size), -1)) for start, size in distinct]
        pairs = np.array([pair for pair in shapes if pair[1] >= 0], dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def is_left(self, starts: Ints, sizes: Ints) -> Bools:
        """Whether each row comes before its mirror image or equals it, (n,).

        ``starts``, ``sizes``: (n, parts), parts in the order of branching.
        """
        if not self.mirrors:
            return np.ones(len(starts), dtype=np.bool_)
        pool = self.tables.problem.pool
        lean = starts // pool.per_node + (starts + sizes - 1) // pool.per_node - (len(pool.nodes) - 1)
        left: Bools = np.ones(len(starts), dtype=np.bool_)
        centred: Bools = np.ones(len(starts), dtype=np.bool_)
        for column in range(lean.shape[1]):
            left &= ~centred | (lean[:, column] <= 0)
            centred &= lean[:, column] == 0
        return left


def _uneven_blocks(ends: frozenset[int], num_devices: int) -> set[tuple[int, int]]:
    """(start, size) of aligned blocks that have one of ``ends``, or the end of the cluster, inside."""
    blocks, size = set(), 2
    top = 1 << (num_devices - 1).bit_length()
    while size <= top:
        blocks |= {(end - end % size, size) for end in (*ends, num_devices) if end % size}
        size *= 2
    return blocks


def distinct_meshes(tables: Tables) -> DistinctMeshes:
    """Return the meshes that no symmetry of the nodes maps to each other."""
    problem = tables.problem
    listed = {end for start, size in problem.meshes.listed for end in (start, start + size)}
    fixed = frozenset(listed | set(problem.pool.runs)) - {0, problem.pool.num_devices}
    return DistinctMeshes(tables, fixed, _mirrors(tables, fixed))


def _mirrors(tables: Tables, fixed: frozenset[int]) -> bool:
    """Whether mirroring the row of nodes maps the space to itself while no two nodes can be swapped."""
    pool, listed = tables.problem.pool, set(tables.problem.meshes.listed)
    end = pool.num_devices
    nodes_fixed = {node * pool.per_node for node in range(1, len(pool.nodes))} <= fixed
    mirrored = {(end - start - size, size) for start, size in listed}
    return nodes_fixed and mirrored == listed and pool.nodes == pool.nodes[::-1]


def climb(state: SearchState, meshes: DistinctMeshes, spots: list[Spot]) -> None:
    """Change ``spots``, one a part, in place until no change of a single part helps."""
    best, part, since = (np.inf, np.inf), 0, 0
    while since < len(spots) and not state.is_exhausted:
        height, spot = best_of_part(state, meshes, spots, part)
        since += 1
        if height < best:
            best, since, spots[part] = height, 1, spot
        part = (part + 1) % len(spots)


def best_of_part(state: SearchState, meshes: DistinctMeshes, spots: Sequence[Spot], part: int) -> tuple[Height, Spot]:
    """Fastest change of a single part: its height, and the part's new spot."""
    changes = _changes(state.tables, meshes, spots, part)
    seconds, over = state.offer(changes)
    row = int(np.argmin(seconds))
    height = 0.0, float(seconds[row])
    if not np.isfinite(seconds[row]):
        row = int(np.argmin(over))
        height = float(over[row]), np.inf
    return height, changes.spot(row)


def _changes(tables: Tables, meshes: DistinctMeshes, spots: Sequence[Spot], part: int) -> PartChanges:
    """Return the assignments with all spots of a part, given the other parts' spots."""
    ends = []
    for other, (start, option) in enumerate(spots):
        if other != part:
            ends += [start, start + int(tables.parts[other].size[option])]
    starts, shapes = meshes.around(ends)
    mesh, options = with_options(tables, part, np.arange(len(starts)), shapes)
    return PartChanges(tables, tuple(spots), part, starts, shapes, mesh, options)


def with_options(tables: Tables, part: int, starts: Ints, shapes: Ints) -> tuple[Ints, Ints]:
    """Pair the start (or number) of each mesh with each option that the part has there."""
    first = tables.parts[part].first
    counts = first[shapes + 1] - first[shapes]
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts), np.repeat(first[shapes], counts) + offsets


def spots_of(tables: Tables, assignment: Assignment) -> list[Spot] | None:
    """Return the spots of an assignment, with options that undercut its own where those are on no front.

    None where a mesh is none of the problem's, or a part has no such option.
    """
    spots = []
    for table, choice in zip(tables.parts, assignment, strict=True):
        shape = tables.shape_at.get((choice.start, choice.size))
        option = None if shape is None else _option_as(table, shape, choice.option)
        if option is None:
            return None
        spots.append((choice.start, option))
    return spots


def _option_as(table: PartTable, shape: int, option: Option) -> int | None:
    """Position of the fastest option of a shape that needs no more memory or time than ``option``; None: there is
    none."""
    options = table.options_of(shape)
    undercut = (table.seconds[options] <= np.array(option.seconds)).all(axis=1)
    undercut &= (table.resting[options] <= option.resting) & (table.active[options] <= option.active)
    found = np.flatnonzero(undercut) + options.start
    alike = [int(at) for at in found if table.options[at].layout == option.layout]
    return min(alike or found.tolist(), key=lambda at: float(table.seconds[at].sum()), default=None)


def beginnings(tables: Tables, meshes: DistinctMeshes) -> Iterator[list[Spot]]:
    """Spots to begin from: every part on the largest mesh it can have, on half and on a quarter of it, with its fastest
    and with its leanest option."""
    starts, shapes = meshes.every()
    for limit in (tables.num_devices, tables.num_devices // 2, tables.num_devices // 4):
        for by_memory in (False, True):
            spots = [_largest(tables, part, starts, shapes, limit, by_memory) for part in range(len(tables.parts))]
            if all(spot is not None for spot in spots):
                yield [spot for spot in spots if spot is not None]


def _largest(tables: Tables, part: int, starts: Ints, shapes: Ints, limit: int, by_memory: bool) -> Spot | None:
    """Spot on the largest mesh of at most ``limit`` devices; None where the part has no option on any."""
    table = tables.parts[part]
    has_options = table.first[shapes + 1] > table.first[shapes]
    fitting = np.flatnonzero(has_options & (tables.sizes[shapes] <= limit))
    if not len(fitting):
        return None
    mesh = fitting[np.lexsort((starts[fitting], -tables.sizes[shapes[fitting]]))[0]]
    options = table.options_of(int(shapes[mesh]))
    cost = table.resting[options] + table.active[options] if by_memory else table.seconds[options].sum(axis=1)
    return int(starts[mesh]), int(options.start + np.argmin(cost))
