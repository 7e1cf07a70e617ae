"""Placements that ratios give, one after the other in lanes: only sizes are decided, first devices follow.

Packing is that of ``placement/ratios.py``, for many assignments at once. With shadows the training side ends where its
last model does, as in a vector, or at the next border of a node. A part that would lie on parts of two nodes, although
it has no more devices than a node, begins with the second one; if it has no room there, it has no place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np

from flexrlhf.guideline.search.bounds import PartialAssignments
from flexrlhf.guideline.search.part_table import Bools, Ints
from flexrlhf.guideline.search.problem import Assignment, DevicePool, Meshes, SearchProblem, Vectors
from flexrlhf.guideline.search.tables import Tables

MOST_SIZES = 32
"""Most numbers of devices that a model is tried on: with more devices their multiples of one number, and the rest."""


MOST_STARTS = 256
"""Most first devices that are tried."""


def step_of(pool: DevicePool) -> int:
    """Return the devices of which sizes are multiples: a part of a node or whole nodes, and of the cluster if one of at
    most twice as many is."""
    end, node = pool.num_devices, pool.per_node
    least = -(-end // MOST_SIZES)
    steps = [step for step in range(least, 2 * least + node) if node % step == 0 or step % node == 0]
    return next((step for step in steps if end % step == 0), steps[0])


def start_step(pool: DevicePool) -> int:
    """Return the devices of which starts and borders between sides are multiples."""
    common = gcd(step_of(pool), pool.num_devices)
    return common if pool.num_devices <= MOST_STARTS * common else step_of(pool)


def sizes_of(pool: DevicePool) -> tuple[int, ...]:
    """Return the numbers of devices that a model is tried on, ascending: multiples of the step, all, and all but one of
    them where starts allow."""
    end, step = pool.num_devices, step_of(pool)
    multiples = range(step, end + 1, step)
    rest = (end - size for size in multiples if start_step(pool) < step)
    return tuple(sorted({*multiples, *rest, end} - {0}))


def with_vector_meshes(problem: SearchProblem, seeds: Sequence[Assignment]) -> SearchProblem:
    """Return ``problem`` with all meshes that sizes and borders of ratio vectors give, and those of ``seeds``."""
    pool, step = problem.pool, step_of(problem.pool)
    end, sizes = pool.num_devices, sizes_of(pool)
    starts = range(0, end, start_step(pool))
    meshes = ((start, size) for size in sizes for start in starts if start + size <= end)
    listed = [mesh for mesh in meshes if problem.shape_of(*mesh).per_node >= min(mesh[1], pool.per_node)]
    listed += [(choice.start, choice.size) for seed in seeds for choice in seed]
    ratios = f"of multiples of {step}/{end}" + (" and what they leave" if start_step(pool) < step else "")
    ratios += " by class" if len(pool.memory) > 1 else ""
    inside = ", a model that fits a node on one" if pool.node_borders else ""
    return replace(problem, meshes=Meshes((), tuple(dict.fromkeys(listed)), f"all vectors {ratios}{inside}"))


@dataclass(frozen=True, eq=False)
class VectorPacking:
    """Meshes of parts in lanes. ``vectors``: of the problem of ``tables``, whose meshes are those of vectors."""

    tables: Tables
    vectors: Vectors

    @cached_property
    def order(self) -> list[int]:
        """Parts in the order in which they are decided: of each side as packed, one that follows after its own."""
        names = [part.name for part in self.tables.problem.parts]
        packed = [name for side in self.vectors.sides for name in side]
        followed = {name: [other for other, own in self.vectors.follows.items() if own == name] for name in packed}
        return [names.index(each) for name in packed for each in (name, *followed[name])]

    @property
    def roots(self) -> PartialAssignments:
        """Return a row for each border between the sides, without a part: negative if training is behind it, which is
        tried on devices of several kinds."""
        end = self.tables.num_devices
        step = start_step(self.tables.problem.pool)
        borders = np.arange(step, end, step) if self._has_sides else np.array([end])
        if self._has_sides and len(self._runs) > 1:
            borders = np.concatenate([borders, -borders])
        none = np.zeros((len(borders), 0), dtype=np.int64)
        return PartialAssignments((), none, none, none, borders)

    def spots(self, partial: PartialAssignments, part: int) -> tuple[Ints, Ints, Ints]:
        """Return (parent row, start, shape) of each mesh of the next part."""
        rows, border = np.arange(len(partial)), partial.border
        assert border is not None, "rows of vectors have a border"
        leader = self._leader(part)
        if leader is not None:
            column = partial.parts.index(leader)
            return rows, partial.starts[:, column], partial.shapes[:, column]
        side = self._side(part)
        columns = [column for column, each in enumerate(partial.parts) if self._is_packed(each, side)]
        before, earlier = partial.starts[:, columns], self.tables.sizes[partial.shapes[:, columns]]
        is_first = (border > 0) == (side == 0)
        lows, highs = np.where(is_first, 0, abs(border)), np.where(is_first, abs(border), self.tables.num_devices)
        found = []
        for run_start, run_end in self._runs:
            low, high = np.maximum(lows, run_start), np.minimum(highs, run_end)
            parents, sizes = np.repeat(rows, len(self._sizes)), np.tile(self._sizes, len(rows))
            kept = sizes <= (high - low)[parents]
            parents, sizes = parents[kept], sizes[kept]
            # the others take no room of this run
            inside = np.where((run_start <= before) & (before < run_end), earlier, 0)[parents]
            starts = self._packed([*inside.T, sizes], low[parents], high[parents])
            shapes = self._shape_at[starts, self._number[sizes]]
            kept = shapes >= 0
            if self._has_sides and part == self._last_of_training:
                ends = np.max([*(before + earlier)[parents].T, starts + sizes], axis=0)
                kept &= self._is_tight(ends, border[parents])
            found.append((parents[kept], starts[kept], shapes[kept]))
        parents, starts, shapes = (np.concatenate(column) for column in zip(*found, strict=True))
        return parents, starts, shapes

    def _packed(self, sizes: Sequence[Ints], first: Ints, end: Ints) -> Ints:
        """Return the starts of the last of ``sizes``, packed one after the other on the devices ``first`` to ``end``.

        All arguments, and each of ``sizes``, are (rows,).
        """
        rows = np.arange(len(first))
        used = np.zeros((len(first), len(sizes)), dtype=np.int64)
        starts = first
        for size in sizes:
            lane = (first[:, None] + used + size[:, None] <= end[:, None]).argmax(axis=1)
            taken = used[rows, lane]
            starts = first + taken
            border = self._next_border[starts]
            inside = (starts < border) & (border < starts + size)
            # the first of a lane is moved only from a place that is none
            inside &= (taken > 0) | (self._shape_at[starts, self._number[size]] < 0)
            starts = np.where(inside & (border + size <= end), border, starts)
            used[rows, lane] = starts + size - first
        return starts

    def _is_tight(self, ends: Ints, borders: Ints) -> Bools:
        """Whether no device of the training side is idle at its end, but for up to the next border of a node."""
        return np.asarray((borders < 0) | (ends == borders) | (self._next_border[ends] == borders))

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """First device and end of each run of devices of one kind: a pool of its own."""
        pool = self.tables.problem.pool
        return list(pairwise((*pool.runs, pool.num_devices)))

    @property
    def _has_sides(self) -> bool:
        return len(self.vectors.sides) > 1

    @cached_property
    def _last_of_training(self) -> int:
        return next(part for part in reversed(self.order) if self._is_packed(part, 0))

    def _leader(self, part: int) -> int | None:
        """Return the part whose devices another one has; None: it is packed itself."""
        names = [each.name for each in self.tables.problem.parts]
        own = self.vectors.follows.get(names[part])
        return None if own is None else names.index(own)

    def _side(self, part: int) -> int:
        name = self.tables.problem.parts[part].name
        return next(number for number, side in enumerate(self.vectors.sides) if name in side)

    def _is_packed(self, part: int, side: int) -> bool:
        """Whether a part has a place of its own on a side."""
        return self.tables.problem.parts[part].name in self.vectors.sides[side]

    @cached_property
    def _sizes(self) -> Ints:
        return np.array(sizes_of(self.tables.problem.pool), dtype=np.int64)

    @cached_property
    def _number(self) -> Ints:
        """Number of each size, (devices + 1,)."""
        return np.asarray(np.searchsorted(self._sizes, np.arange(self.tables.num_devices + 1)))

    @cached_property
    def _next_border(self) -> Ints:
        """First device of a node, or end of the cluster, at or after each device, (devices + 1,)."""
        end = self.tables.num_devices
        borders = np.array([0, *self.tables.problem.pool.node_borders, end])
        return np.asarray(borders[np.searchsorted(borders, np.arange(end + 1))])

    @cached_property
    def _shape_at(self) -> Ints:
        """Shape by start and number of the size; -1 where it is no mesh, (devices + 1, sizes)."""
        shapes = np.full((self.tables.num_devices + 1, len(self._sizes)), -1, dtype=np.int64)
        for (start, size), shape in self.tables.shape_at.items():
            if size in self._sizes:
                shapes[start, self._number[size]] = shape
        return shapes
