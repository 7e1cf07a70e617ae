"""The problem as arrays: the fronts of options by part and shape, the time of links by pairs of ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.search.evaluate import CallGraph, Link, call_graph
from flexrlhf.guideline.search.problem import LinkEnd, MeshShape, Option, SearchPart, SearchProblem
from flexrlhf.placement.routes import RELATIONS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
SAME, OVERLAPPING, DISJOINT = range(len(RELATIONS))
SHAPE_STEP = 4.0
"""Distance of the keys of two shapes; memory counts from 0 to 2 devices."""
MEMORY_ROUNDING = 1e-8


@dataclass(frozen=True, eq=False)
class SecondsByMemory:
    """The least time of each task among the options of a shape that need at most a given memory.

    keys:     shape and memory of each option in one number, sorted.
    first:    first position of each shape among ``keys``.
    seconds:  the least up to that key within its shape, (n, tasks).
    scale:    bytes of the largest device.
    """

    keys: Floats
    first: Ints
    seconds: Floats
    scale: float

    def least(self, shapes: Ints, room: Floats) -> Floats:
        """Return the least time of ``shapes`` within ``room`` bytes, (n, tasks); infinite where no option fits."""
        limit = np.clip(room / self.scale + MEMORY_ROUNDING, -1.0, 1.5)
        position = np.searchsorted(self.keys, shapes * SHAPE_STEP + limit, side="right")
        seconds: Floats = self.seconds[np.maximum(position - 1, 0)]
        return np.where((position > self.first[shapes])[:, None], seconds, np.inf)


@dataclass(frozen=True, eq=False)
class PartTable:
    """All options of a part in a row, by shape: shape ``s`` has ``options[first[s]:first[s + 1]]``.

    options:        the options on the fronts of their shapes.
    first:          first option of each shape.
    shape:          shape of each option.
    size:           devices of each option.
    seconds:        time of each option, (n, tasks).
    resting:        bytes of each option all the time.
    active:         bytes that a task of each option needs in addition.
    end:            index of (shape, layout) of each option in ``ends``.
    ends:           the distinct link ends.
    least_seconds:  the least of ``seconds`` by shape, (shapes, tasks); infinite where there is no option.
    least_resting:  the same of ``resting``, (shapes,).
    least_active:   the same of ``active``, (shapes,).
    num_stated:     options by shape before those that others undercut are left out.
    by_memory:      least seconds by shape and memory.
    """

    options: tuple[Option, ...]
    first: Ints
    shape: Ints
    size: Ints
    seconds: Floats
    resting: Floats
    active: Floats
    end: Ints
    ends: tuple[LinkEnd, ...]
    least_seconds: Floats
    least_resting: Floats
    least_active: Floats
    num_stated: tuple[int, ...]
    by_memory: SecondsByMemory

    def options_of(self, shape: int) -> slice:
        return slice(int(self.first[shape]), int(self.first[shape + 1]))

    def ends_of(self, shape: int) -> Ints:
        """Return the indices of the distinct link ends of a shape."""
        if shape not in self._ends_of:
            self._ends_of[shape] = np.unique(self.end[self.options_of(shape)])
        return self._ends_of[shape]

    @cached_property
    def _ends_of(self) -> dict[int, Ints]:
        """Shape → indices of its link ends, filled on use."""
        return {}


@dataclass(frozen=True, eq=False)
class LinkTable:
    """Seconds of a link, computed when they are first needed.

    link:     the link.
    source:   table of the part that it comes from.
    to:       table of the part that it goes to.
    sides:    number of the side of each end, for both parts.
    firsts:   first end of each side, for both parts.
    values:   seconds by (side, side, relation); NaN where not yet computed.
    alike:    first shape with the size, kinds and devices in a node of each.
    least:    the least seconds by (shape, shape, relation), of first alike ones; NaN where not yet computed.
    """

    link: Link
    source: PartTable
    to: PartTable
    sides: tuple[Ints, Ints]
    firsts: tuple[Ints, Ints]
    values: Floats
    alike: Ints
    least: Floats

    def seconds(self, sources: Ints, targets: Ints, relations: Ints) -> Floats:
        """Return the seconds by link ends and relation, which are broadcast against each other."""
        sources, targets = self.sides[0][sources], self.sides[1][targets]
        seconds: Floats = self.values[sources, targets, relations]
        missing = np.isnan(seconds)
        if missing.any():
            for source, to, relation in _distinct(missing, sources, targets, relations):
                ends = self.source.ends[self.firsts[0][source]], self.to.ends[self.firsts[1][to]]
                taken = self.link.seconds(*ends, RELATIONS[relation])
                self.values[source, to, relation] = taken
            seconds = self.values[sources, targets, relations]
        return seconds

    def least_seconds(self, sources: Ints, targets: Ints, relations: Ints) -> Floats:
        """Return the least seconds by mesh shapes and relation, (n,), whatever borders of nodes allow on them.

        0 if a part has no option on one of them.
        """
        sources, targets = self.alike[sources], self.alike[targets]
        least: Floats = self.least[sources, targets, relations]
        missing = np.isnan(least)
        if missing.any():
            for source, to, relation in _distinct(missing, sources, targets, relations):
                ends = self._ends_of(self.source, source)[:, None], self._ends_of(self.to, to)[None, :]
                taken = self.seconds(*ends, np.array([[relation]])) if ends[0].size and ends[1].size else np.zeros(1)
                self.least[source, to, relation] = taken.min()
            least = self.least[sources, targets, relations]
        return least

    def _ends_of(self, part: PartTable, first: int) -> Ints:
        """Return the link ends of ``part``, one for each side, on all shapes that are like the ``first``."""
        ends = np.concatenate([part.ends_of(int(shape)) for shape in np.flatnonzero(self.alike == first)])
        sides = self.sides[0 if part is self.source else 1][ends]
        return ends[np.unique(sides, return_index=True)[1]]


def _distinct(chosen: Bools, *indices: Ints) -> Iterable[tuple[int, ...]]:
    """Return the tuples of ``indices``, broadcast against each other, where ``chosen``; each once."""
    # mostly a few, for which a set takes a tenth of np.unique's time
    return dict.fromkeys(zip(*(each[chosen].tolist() for each in np.broadcast_arrays(*indices)), strict=True))


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
        _part_table(part, shapes, index in linked, max(pool.memory.values()))
        for index, part in enumerate(problem.parts)
    )
    first: dict[Hashable, int] = {}
    alike = [first.setdefault((each.size, each.kinds, each.per_node), index) for index, each in enumerate(shapes)]
    links = tuple(_link_table(link, parts, np.array(alike, dtype=np.int64)) for link in graph.links)
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


def _part_table(part: SearchPart, shapes: Sequence[MeshShape], has_links: bool, memory: float) -> PartTable:
    """Return the table of a part. ``memory``: bytes of the largest device."""
    stated = [list(part.options(shape)) for shape in shapes]
    # shapes that nodes divide otherwise mostly have the same options
    of_options: dict[tuple[int, ...], list[Option]] = {}
    for options in stated:
        key = tuple(map(id, options))
        if key not in of_options:
            of_options[key] = pareto(options, has_links)
    fronts = [of_options[tuple(map(id, options))] for options in stated]
    options = [option for front in fronts for option in front]
    shape = np.repeat(np.arange(len(shapes)), [len(front) for front in fronts])
    ends = [LinkEnd(shapes[s], option.layout) for s, option in zip(shape.tolist(), options, strict=True)]
    unique = {end: index for index, end in enumerate(dict.fromkeys(ends))}
    width = len(options[0].seconds) if options else 0
    seconds = np.array([option.seconds for option in options], dtype=np.float64).reshape(len(options), width)
    resting = np.array([option.resting for option in options], dtype=np.float64)
    active = np.array([option.active for option in options], dtype=np.float64)
    first = np.concatenate([[0], np.cumsum([len(front) for front in fronts])]).astype(np.int64)
    return PartTable(
        options=tuple(options),
        first=first,
        shape=shape,
        size=np.array([shapes[s].size for s in shape.tolist()], dtype=np.int64),
        seconds=seconds,
        resting=resting,
        active=active,
        end=np.array([unique[end] for end in ends], dtype=np.int64),
        ends=tuple(unique),
        least_seconds=_least(seconds, first),
        least_resting=_least(resting[:, None], first)[:, 0],
        least_active=_least(active[:, None], first)[:, 0],
        num_stated=tuple(len(options) for options in stated),
        by_memory=_by_memory(shape, seconds, resting + active, first, memory),
    )


def undominated(rows: Floats) -> Ints:
    """Return the ascending indices of the rows that no other row matches or undercuts in all columns.

    Of equal rows the first counts. ``rows``: (n, figures).
    """
    order = np.lexsort(rows.T[::-1])
    kept: list[int] = []
    for index in order:
        if not kept or not np.any(np.all(rows[kept] <= rows[index], axis=1)):
            kept.append(int(index))
    return np.array(sorted(kept), dtype=np.int64)


def pareto(options: Sequence[Option], has_links: bool) -> list[Option]:
    """Return the Pareto front of (time of each task, resting, active) among options on one mesh.

    Where the time of links depends on the layout, an option is compared with others of its own layout alone.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, option in enumerate(options):
        groups.setdefault(option.layout if has_links else (), []).append(index)
    kept: list[int] = []
    for members in groups.values():
        rows = np.array([[*options[i].seconds, options[i].resting, options[i].active] for i in members])
        kept += [members[i] for i in undominated(rows)]
    return [options[index] for index in sorted(kept)]


def _by_memory(shape: Ints, seconds: Floats, needed: Floats, first: Ints, scale: float) -> SecondsByMemory:
    """Return the least seconds by memory. ``needed``: bytes of each option. ``scale``: bytes of the largest device."""
    order = np.lexsort((needed, shape))
    least = seconds[order]
    for start, stop in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        least[start:stop] = np.minimum.accumulate(least[start:stop], axis=0)
    keys = shape[order] * SHAPE_STEP + np.minimum(needed[order] / scale, 2.0)
    return SecondsByMemory(keys, first, least, scale)


def _least(rows: Floats, first: Ints) -> Floats:
    """Return the least of each column by shape, (shapes, columns); infinite where a shape has no rows."""
    least = np.full((len(first) - 1, rows.shape[1]), np.inf)
    for shape in range(len(first) - 1):
        if first[shape] < first[shape + 1]:
            least[shape] = rows[first[shape] : first[shape + 1]].min(axis=0)
    return least


def _link_table(link: Link, parts: Sequence[PartTable], alike: Ints) -> LinkTable:
    source, to = parts[link.source], parts[link.to]
    numbers, firsts = zip(*(_sides(part.ends, link) for part in (source, to)), strict=True)
    values = np.full((*map(len, firsts), len(RELATIONS)), np.nan)
    least = np.full((len(alike), len(alike), len(RELATIONS)), np.nan)
    return LinkTable(link, source, to, numbers, firsts, values, alike, least)


def _sides(ends: Sequence[LinkEnd], link: Link) -> tuple[Ints, Ints]:
    """Return each end's side by number, one for ends for which ``link`` takes as long, and the first end of each."""
    numbers: dict[Hashable, int] = {}
    of_end = np.array([numbers.setdefault(link.side(end), len(numbers)) for end in ends], dtype=np.int64)
    _, firsts = np.unique(of_end, return_index=True)
    return of_end, firsts.astype(np.int64)
