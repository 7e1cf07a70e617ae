"""The problem as arrays: the options of its parts, and the time of its links."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np

from flexrlhf.guideline.costs.relations import RELATIONS
from flexrlhf.guideline.search.evaluate import CallGraph, call_graph
from flexrlhf.guideline.search.link_table import LinkTable, link_sides, link_table
from flexrlhf.guideline.search.part_table import Floats, Ints, PartTable, part_table
from flexrlhf.guideline.search.problem import MeshShape, SearchProblem

SAME, OVERLAPPING, DISJOINT = range(len(RELATIONS))


@dataclass(frozen=True, eq=False)
class Tables:
    """A problem as arrays.

    problem:    the problem.
    graph:      its calls by number.
    shapes:     the shapes of its meshes, by size.
    sizes:      devices of each shape.
    parts:      table of each part.
    links:      table of each link.
    shape_at:   mesh → its shape.
    memory_at:  (first device, bytes) of each run of devices of one kind.
    space:      number of assignments that the problem states.
    """

    problem: SearchProblem
    graph: CallGraph
    shapes: tuple[MeshShape, ...]
    sizes: Ints
    parts: tuple[PartTable, ...]
    links: tuple[LinkTable, ...]
    shape_at: dict[tuple[int, int], int]
    memory_at: tuple[tuple[int, float], ...]
    space: int

    @property
    def num_devices(self) -> int:
        return self.problem.pool.num_devices

    @property
    def is_uniform(self) -> bool:
        """Whether all devices have the same memory."""
        return len({memory for _, memory in self.memory_at}) == 1

    @property
    def most_memory(self) -> float:
        """Bytes of the largest device."""
        return max(memory for _, memory in self.memory_at)

    def memory_of(self, device: int) -> float:
        """Return the bytes of a device that may be used."""
        return [memory for start, memory in self.memory_at if start <= device][-1]

    def memory_on(self, devices: Ints) -> Floats:
        """Return the bytes of each of ``devices``, (n,)."""
        if self.is_uniform:
            return np.full(len(devices), self.memory_at[0][1])
        firsts, memory = (np.array(column) for column in zip(*self.memory_at, strict=True))
        return np.asarray(memory[np.searchsorted(firsts, devices, side="right") - 1])


@lru_cache(maxsize=16)
def tables_of(problem: SearchProblem) -> Tables:
    """Return the costs of ``problem`` as arrays."""
    graph, pool = call_graph(problem), problem.pool
    shape_at, shapes, counts = _shapes(problem)
    linked = {part for link in graph.links for part in (link.source, link.to)}
    parts = tuple(
        part_table(part, shapes, index in linked, max(pool.memory.values())) for index, part in enumerate(problem.parts)
    )
    numbers: dict[Hashable, int] = {}
    alike = [numbers.setdefault((each.size, each.kinds, each.per_node), len(numbers)) for each in shapes]
    most, groups = max(pool.memory.values()), np.array(alike, dtype=np.int64)
    ends = dict.fromkeys((part, link.side) for link in graph.links for part in (link.source, link.to))
    sides = {(part, side): link_sides(parts[part], side, groups, most) for part, side in ends}
    links = tuple(
        link_table(link, parts, sides[link.source, link.side], sides[link.to, link.side]) for link in graph.links
    )
    stated = {(p, shape): part.num_stated[s] for p, part in enumerate(parts) for s, shape in enumerate(shapes)}
    sizes = np.array([shape.size for shape in shapes], dtype=np.int64)
    memory_at = tuple((start, pool.memory[pool.nodes[start // pool.per_node]]) for start in pool.runs)
    space = problem.size_of_space(stated, dict(zip(shapes, counts, strict=True)))
    return Tables(problem, graph, tuple(shapes), sizes, parts, links, shape_at, memory_at, space)


def _shapes(problem: SearchProblem) -> tuple[dict[tuple[int, int], int], list[MeshShape], list[int]]:
    """Return the shape of every mesh, the shapes by size, and the number of meshes of each."""
    of_mesh = {mesh: problem.shape_of(*mesh) for mesh in problem.all_meshes}
    shapes = sorted(set(of_mesh.values()), key=astuple)
    index = {shape: number for number, shape in enumerate(shapes)}
    shape_at = {mesh: index[shape] for mesh, shape in of_mesh.items()}
    counts = [0] * len(shapes)
    for number in shape_at.values():
        counts[number] += 1
    return shape_at, shapes, counts
