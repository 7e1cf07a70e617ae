"""The problem as arrays: the fronts of options by part and shape, seconds of links by pairs of ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.search.graph import Graph, Link, graph_of
from flexrlhf.guideline.search.pareto import Floats, pareto
from flexrlhf.guideline.search.problem import End, Option, Part, Problem, Shape
from flexrlhf.placement.relation import RELATIONS

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
SAME, OVERLAPPING, DISJOINT = range(len(RELATIONS))


@dataclass(frozen=True, eq=False)
class Caps:
    """The least seconds of each task among the options of a shape that need no more than so much memory.

    ``keys``: shape and memory in one number, sorted; ``seconds`` after it: the least so far of the shape. ``scale``:
    bytes of the largest device.
    """

    keys: Floats
    first: Ints
    seconds: Floats
    scale: float

    def least(self, shapes: Ints, room: Floats) -> Floats:
        """Of each row; infinite where no option fits."""
        asked = np.clip(room / self.scale + CAP_ROUNDING, -1.0, 1.5)
        place = np.searchsorted(self.keys, shapes * CAP_STEP + asked, side="right")
        found: Floats = self.seconds[np.maximum(place - 1, 0)]
        return np.where((place > self.first[shapes])[:, None], found, np.inf)


CAP_STEP = 4.0
"""Between the keys of two shapes; memory counts from 0 to 2 devices."""
CAP_ROUNDING = 1e-8


@dataclass(frozen=True, eq=False)
class PartTable:
    """All options of a part in a row, by shape: ``options[first[s]:first[s + 1]]`` are those of shape ``s``.

    ``end``: index of (shape, layout) in ``ends``. ``least_*``: the least of each figure by shape, infinite where there
    is no option.
    """

    options: tuple[Option, ...]
    first: Ints
    shape: Ints
    size: Ints
    seconds: Floats
    resting: Floats
    active: Floats
    end: Ints
    ends: tuple[End, ...]
    least_seconds: Floats
    least_resting: Floats
    least_active: Floats
    num_stated: tuple[int, ...]
    caps: Caps

    def options_of(self, shape: int) -> slice:
        return slice(int(self.first[shape]), int(self.first[shape + 1]))

    def ends_of(self, shape: int) -> Ints:
        return np.unique(self.end[self.options_of(shape)])


@dataclass(frozen=True, eq=False)
class LinkTable:
    """Seconds by (end, end, relation), asked for when needed; ``least``: the least by (shape, shape, relation)."""

    link: Link
    source: PartTable
    to: PartTable
    values: Floats
    least: Floats

    def seconds(self, sources: Ints, targets: Ints, relations: Ints) -> Floats:
        found: Floats = self.values[sources, targets, relations]
        missing = np.isnan(found)
        if missing.any():
            sources, targets, relations = np.broadcast_arrays(sources, targets, relations)
            asked = np.unique(np.stack([sources[missing], targets[missing], relations[missing]], axis=1), axis=0)
            for source, to, relation in asked.tolist():
                taken = self.link.seconds(self.source.ends[source], self.to.ends[to], RELATIONS[relation])
                self.values[source, to, relation] = taken
            found = self.values[sources, targets, relations]
        return found

    def least_seconds(self, sources: Ints, targets: Ints, relations: Ints) -> Floats:
        """By shapes."""
        found: Floats = self.least[sources, targets, relations]
        missing = np.isnan(found)
        if missing.any():
            asked = np.unique(np.stack([sources[missing], targets[missing], relations[missing]], axis=1), axis=0)
            for source, to, relation in asked.tolist():
                ends = self.source.ends_of(source)[:, None], self.to.ends_of(to)[None, :]
                taken = self.seconds(*ends, np.array([[relation]])) if ends[0].size and ends[1].size else np.zeros(1)
                self.least[source, to, relation] = taken.min()
            found = self.least[sources, targets, relations]
        return found


@dataclass(frozen=True, eq=False)
class Tables:
    """``sizes``: devices by shape. ``shape_at``: shape of each mesh. ``memory_at``: (first device, bytes) of each run
    of alike devices."""

    problem: Problem
    graph: Graph
    shapes: tuple[Shape, ...]
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

    def memory_of(self, device: int) -> float:
        return [memory for start, memory in self.memory_at if start <= device][-1]


@lru_cache(maxsize=16)
def tables_of(problem: Problem) -> Tables:
    graph, pool = graph_of(problem), problem.pool
    shape_at, shapes, counts = _shapes(problem)
    linked = {part for link in graph.links for part in (link.source, link.to)}
    parts = tuple(
        _part_table(part, shapes, index in linked, max(pool.memory.values()))
        for index, part in enumerate(problem.parts)
    )
    links = tuple(_link_table(link, parts, len(shapes)) for link in graph.links)
    stated = {(p, shape): part.num_stated[s] for p, part in enumerate(parts) for s, shape in enumerate(shapes)}
    sizes = np.array([shape.size for shape in shapes], dtype=np.int64)
    memory_at = tuple((start, pool.memory[pool.nodes[start // pool.per_node]]) for start in pool.runs)
    space = problem.size_of_space(stated, dict(zip(shapes, counts, strict=True)))
    return Tables(problem, graph, tuple(shapes), sizes, parts, links, shape_at, memory_at, space)


def _shapes(problem: Problem) -> tuple[dict[tuple[int, int], int], list[Shape], list[int]]:
    """Shape of every mesh, the shapes by size, and the number of meshes of each."""
    of_mesh = {mesh: problem.shape_of(*mesh) for mesh in problem.all_meshes}
    shapes = sorted(set(of_mesh.values()), key=lambda shape: (shape.size, shape.kinds))
    index = {shape: number for number, shape in enumerate(shapes)}
    shape_at = {mesh: index[shape] for mesh, shape in of_mesh.items()}
    counts = [0] * len(shapes)
    for number in shape_at.values():
        counts[number] += 1
    return shape_at, shapes, counts


def _part_table(part: Part, shapes: Sequence[Shape], has_links: bool, memory: float) -> PartTable:
    stated = [list(part.options(shape)) for shape in shapes]
    fronts = [pareto(options, has_links) for options in stated]
    options = [option for front in fronts for option in front]
    shape = np.repeat(np.arange(len(shapes)), [len(front) for front in fronts])
    ends = [End(shapes[s], option.layout) for s, option in zip(shape.tolist(), options, strict=True)]
    unique = {end: index for index, end in enumerate(dict.fromkeys(ends))}
    width = len(options[0].seconds) if options else 0
    seconds = np.array([option.seconds for option in options], dtype=np.float64).reshape(len(options), width)
    resting = np.array([option.resting for option in options], dtype=np.float64)
    active = np.array([option.active for option in options], dtype=np.float64)
    first = np.concatenate([[0], np.cumsum([len(front) for front in fronts])]).astype(np.int64)
    return PartTable(
        tuple(options),
        first,
        shape,
        np.array([shapes[s].size for s in shape.tolist()], dtype=np.float64).astype(np.int64),
        seconds,
        resting,
        active,
        np.array([unique[end] for end in ends], dtype=np.int64),
        tuple(unique),
        _least(seconds, first),
        _least(resting[:, None], first)[:, 0],
        _least(active[:, None], first)[:, 0],
        tuple(len(options) for options in stated),
        _caps(shape, seconds, resting + active, first, memory),
    )


def _caps(shape: Ints, seconds: Floats, needed: Floats, first: Ints, scale: float) -> Caps:
    order = np.lexsort((needed, shape))
    least = seconds[order]
    for start, stop in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        least[start:stop] = np.minimum.accumulate(least[start:stop], axis=0)
    keys = shape[order] * CAP_STEP + np.minimum(needed[order] / scale, 2.0)
    return Caps(keys, first, least, scale)


def _least(rows: Floats, first: Ints) -> Floats:
    """By shape."""
    least = np.full((len(first) - 1, rows.shape[1]), np.inf)
    for shape in range(len(first) - 1):
        if first[shape] < first[shape + 1]:
            least[shape] = rows[first[shape] : first[shape + 1]].min(axis=0)
    return least


def _link_table(link: Link, parts: Sequence[PartTable], num_shapes: int) -> LinkTable:
    source, to = parts[link.source], parts[link.to]
    values = np.full((len(source.ends), len(to.ends), len(RELATIONS)), np.nan)
    least = np.full((num_shapes, num_shapes, len(RELATIONS)), np.nan)
    return LinkTable(link, source, to, values, least)
