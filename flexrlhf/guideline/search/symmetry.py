"""Meshes for the next part: one of each set that differ by a swap of devices which changes nothing.

Two halves of an aligned block may be swapped when no mesh has an end inside the block: the swap maps the space and all
that is placed to itself. Parts are all distinct, so these swaps (and the cluster's mirror image) are all there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flexrlhf.guideline.search.tables import Bools, Ints, Tables


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
