"""The problem as arrays: the fronts of options by part and shape, the time of links by pairs of ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.search.evaluate import CallGraph, Link, call_graph
from flexrlhf.guideline.search.link_times import LinkTimes
from flexrlhf.guideline.search.problem import LinkEnd, MeshShape, Option, SearchPart, SearchProblem
from flexrlhf.placement.routes import RELATIONS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
SAME, OVERLAPPING, DISJOINT = range(len(RELATIONS))
SHAPE_STEP = 4.0
"""Distance of the keys of two shapes; memory counts from 0 to 2 devices."""
MEMORY_ROUNDING = 1e-8
COMPARED_AT_ONCE = 256
"""Rows with which all others are compared in one array."""


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
        position = _fitting(self.keys, shapes, room / self.scale)
        seconds: Floats = self.seconds[np.maximum(position - 1, 0)]
        return np.where((position > self.first[shapes])[:, None], seconds, np.inf)


def _fitting(keys: Floats, groups: Ints, room: Floats) -> Ints:
    """Return the positions among ``keys``, of groups and memory, after the last that fits into ``room`` devices."""
    limits = groups * SHAPE_STEP + np.clip(room + MEMORY_ROUNDING, -1.0, 1.5)
    return np.asarray(np.searchsorted(keys, limits, side="right"))


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

    @cached_property
    def total(self) -> Floats:
        """Time of all tasks of each option together."""
        return np.asarray(self.seconds.sum(axis=1))

    def options_of(self, shape: int) -> slice:
        return slice(int(self.first[shape]), int(self.first[shape + 1]))


@dataclass(frozen=True, eq=False)
class LinkSides:
    """The sides of a link's ends on alike meshes, each with the memory that the leanest option of such an end needs.

    alike:  number of each shape's group: those with the same size, kinds and devices in a node, whatever borders of
            nodes allow on them.
    keys:   group and memory of each side in one number, sorted.
    ends:   an end of each side.
    first:  first position of each group among ``ends``.
    scale:  bytes of the largest device.
    """

    alike: Ints
    keys: Floats
    ends: Ints
    first: Ints
    scale: float

    def of(self, group: int) -> Ints:
        """Return an end of each side of a group, the leanest first."""
        return self.ends[self.first[group] : self.first[group + 1]]

    def last(self, groups: Ints, room: Floats) -> Ints:
        """Return the place of the last side that fits into ``room`` bytes in its group, (n,); the first at least."""
        return np.asarray(np.maximum(_fitting(self.keys, groups, room / self.scale) - self.first[groups] - 1, 0))


@dataclass(eq=False)
class LinkTable:
    """Seconds of a link, computed when they are first needed.

    link:     the link.
    source:   table of the part that it comes from.
    to:       table of the part that it goes to.
    times:    those that are known.
    sides:    number in ``times`` of the side of each end, for both parts.
    firsts:   first end of each side, for both parts.
    alike:    sides by group of meshes and memory, for both parts.
    place:    first of ``least`` by (group, group, relation); negative where not yet computed.
    least:    the least seconds of sides up to those with as much memory, both in the order of their groups.
    """

    link: Link
    source: PartTable
    to: PartTable
    times: LinkTimes
    sides: tuple[Ints, Ints]
    firsts: tuple[dict[int, int], dict[int, int]]
    alike: tuple[LinkSides, LinkSides]
    place: Ints
    least: Floats

    def seconds(self, sources: Ints | int, targets: Ints | int, relations: Ints) -> Floats:
        """Return the seconds by link ends and relation, which are broadcast against each other."""
        sources, targets = self.sides[0][sources], self.sides[1][targets]
        values = self.times.values
        seconds: Floats = values[sources, targets, relations]
        missing = np.isnan(seconds)
        if missing.any():
            for source, to, relation in _distinct(missing, sources, targets, relations):
                ends = self.source.ends[self.firsts[0][source]], self.to.ends[self.firsts[1][to]]
                values[source, to, relation] = self.times(*ends, RELATIONS[relation])
            seconds = values[sources, targets, relations]
        return seconds

    def least_seconds(self, shapes: tuple[Ints, Ints], relations: Ints, rooms: tuple[Floats, Floats]) -> Floats:
        """Return the least seconds between ends whose options fit, (n,); 0 where a part has no option on its mesh.

        shapes:  of the meshes of both parts.
        rooms:   bytes that the option of each may need.
        """
        sources, targets = (sides.alike[shape] for sides, shape in zip(self.alike, shapes, strict=True))
        missing = self.place[sources, targets, relations] < 0
        if missing.any():
            self._fill(list(_distinct(missing, sources, targets, relations)))
        (source, to), width = self.alike, np.diff(self.alike[1].first)[targets]
        place = self.place[sources, targets, relations] + width * source.last(sources, rooms[0])
        return np.asarray(self.least[place + to.last(targets, rooms[1])])

    def _fill(self, keys: Sequence[tuple[int, ...]]) -> None:
        """Compute the least seconds of ``keys``: (group, group, relation)."""
        blocks, size = [self.least], self.least.size
        for source, to, relation in keys:
            ends = self.alike[0].of(source)[:, None], self.alike[1].of(to)[None, :]
            block = np.zeros((1, 1))
            if ends[0].size and ends[1].size:
                block = self.seconds(*ends, np.array([[relation]]))
            for axis in range(2):
                block = np.minimum.accumulate(block, axis=axis)
            self.place[source, to, relation] = size
            blocks.append(block.ravel())
            size += block.size
        self.least = np.concatenate(blocks)


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
    numbers: dict[Hashable, int] = {}
    alike = [numbers.setdefault((each.size, each.kinds, each.per_node), len(numbers)) for each in shapes]
    most, groups = max(pool.memory.values()), np.array(alike, dtype=np.int64)
    links = tuple(_link_table(link, parts, groups, most) for link in graph.links)
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
    unique, end = _link_ends(shapes, shape.tolist(), options)
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
        end=np.array(end, dtype=np.int64),
        ends=tuple(unique),
        least_seconds=_least(seconds, first),
        least_resting=_least(resting[:, None], first)[:, 0],
        least_active=_least(active[:, None], first)[:, 0],
        num_stated=tuple(len(options) for options in stated),
        by_memory=_by_memory(shape, seconds, resting + active, first, memory),
    )


def _link_ends(
    shapes: Sequence[MeshShape], shape: Sequence[int], options: Sequence[Option]
) -> tuple[dict[LinkEnd, int], list[int]]:
    """Return the distinct link ends with their numbers, and the number of each option's."""
    unique: dict[LinkEnd, int] = {}
    # most options share their layout with others, whose hash takes longer than its identity
    known: dict[tuple[int, int], int] = {}
    numbers = []
    for s, option in zip(shape, options, strict=True):
        key = s, id(option.layout)
        if key not in known:
            known[key] = unique.setdefault(LinkEnd(shapes[s], option.layout), len(unique))
        numbers.append(known[key])
    return unique, numbers


def undominated(rows: Floats) -> Ints:
    """Return the ascending indices of the rows that no other row matches or undercuts in all columns.

    Of equal rows the first counts. ``rows``: (n, figures).
    """
    kept = np.arange(len(rows))
    # fewer rows with every block, whose number times that of rows is the memory of a comparison
    for start in range(0, len(rows), COMPARED_AT_ONCE):
        block = np.arange(start, min(start + COMPARED_AT_ONCE, len(rows)))
        below = np.ones((len(block), len(kept)), dtype=bool)
        above = below.copy()
        for column in rows.T:
            below &= column[block][:, None] <= column[kept][None, :]
            above &= column[block][:, None] >= column[kept][None, :]
        beaten = (below & (~above | (block[:, None] < kept[None, :]))).any(axis=0)
        kept = kept[~beaten]
    return kept


def pareto(options: Sequence[Option], has_links: bool) -> list[Option]:
    """Return the Pareto front of (time of each task, resting, active) among options on one mesh.

    Where the time of links depends on the layout, an option is compared with others of its own layout alone.
    """
    if not options:
        return []
    numbers: dict[Hashable, int] = {}
    rows = []
    for each in options:
        # of two layouts neither number nor its opposite are both below the other's
        layout = numbers.setdefault(each.layout, len(numbers)) if has_links else 0
        rows.append([layout, -layout, *each.seconds, each.resting, each.active])
    return [options[index] for index in undominated(np.array(rows)).tolist()]


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


def _link_table(link: Link, parts: Sequence[PartTable], groups: Ints, memory: float) -> LinkTable:
    """Return the table of a link. ``groups``: number of each shape's alike ones. ``memory``: bytes of the largest
    device."""
    ends = parts[link.source], parts[link.to]
    times = link.seconds if isinstance(link.seconds, LinkTimes) else LinkTimes(link.seconds)
    known = zip(ends, times.numbers, strict=True)
    sides, firsts = zip(*(_sides(part.ends, link, numbers) for part, numbers in known), strict=True)
    times.make_room()
    alike = _by_group(ends[0], sides[0], groups, memory), _by_group(ends[1], sides[1], groups, memory)
    number = int(groups.max()) + 1
    place = np.full((number, number, len(RELATIONS)), -1)
    return LinkTable(link, *ends, times, sides, firsts, alike, place, np.zeros(0))


def _by_group(part: PartTable, sides: Ints, groups: Ints, memory: float) -> LinkSides:
    """Return an end of each side that ``part`` has in each group of shapes. ``sides``: number of each end's side."""
    needed = np.full(len(part.ends), np.inf)
    np.minimum.at(needed, part.end, part.resting + part.active)
    group = np.zeros(len(part.ends), dtype=np.int64)
    group[part.end] = groups[part.shape]
    order = np.lexsort((needed, sides, group))
    distinct = np.unique(np.stack([group[order], sides[order]]), axis=1, return_index=True)[1]
    leanest = order[distinct]
    keys = group[leanest] * SHAPE_STEP + np.minimum(needed[leanest] / memory, 2.0)
    ordered = np.argsort(keys, kind="stable")
    first = np.searchsorted(group[leanest][ordered], np.arange(int(groups.max()) + 2))
    return LinkSides(groups, keys[ordered], leanest[ordered], first, memory)


def _sides(ends: Sequence[LinkEnd], link: Link, numbers: dict[Hashable, int]) -> tuple[Ints, dict[int, int]]:
    """Return each end's side by number, one for ends for which ``link`` takes as long, and the first end of each.

    ``numbers``: of known sides, to which those that are new are added.
    """
    sides = [numbers.setdefault(link.side(end), len(numbers)) for end in ends]
    firsts = {side: len(sides) - 1 - at for at, side in enumerate(reversed(sides))}
    return np.array(sides, dtype=np.int64), firsts
