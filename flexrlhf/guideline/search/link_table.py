"""Time of a link by the ends of its parts, and the least by their meshes and the memory that they leave."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.costs.relations import RELATIONS, Relation
from flexrlhf.guideline.search.evaluate import Link
from flexrlhf.guideline.search.part_table import SHAPE_STEP, Bools, Floats, Ints, PartTable, fitting
from flexrlhf.guideline.search.problem import LinkEnd, LinkSeconds, LinkSide


@dataclass(frozen=True, eq=False)
class LinkSides:
    """The sides of a part's ends, and on alike meshes each with the memory that the leanest option of it needs.

    sides:  the distinct sides.
    side:   index of each end's.
    some:   an end of each.
    alike:  number of each shape's group: those with the same size, kinds and devices in a node, whatever borders of
            nodes allow on them.
    keys:   group and memory of each side in one number, sorted.
    ends:   an end of each side.
    first:  first position of each group among ``ends``.
    scale:  bytes of the largest device.
    """

    sides: tuple[Hashable, ...]
    side: Ints
    some: Ints
    alike: Ints
    keys: Floats
    ends: Ints
    first: Ints
    scale: float

    def of(self, group: int) -> Ints:
        """Return an end of each side of a group, the leanest first."""
        return self.ends[self.first[group] : self.first[group + 1]]

    def places(self, shapes: Ints, room: Floats) -> tuple[Ints, Ints]:
        """Return the group of each shape, and there the place of the last side that fits into ``room`` bytes, the first
        at least, (n,) each."""
        groups = self.alike[shapes]
        last = fitting(self.keys, groups, room / self.scale) - self.first[groups] - 1
        return groups, np.maximum(last, 0)


@dataclass(eq=False)
class LinkTable:
    """Seconds of a link, computed when they are first needed.

    link:     the link.
    source:   table of the part that it comes from.
    to:       table of the part that it goes to.
    times:    those that are known.
    sides:    number in ``times`` of the side of each end, for both parts.
    alike:    sides by group of meshes and memory, for both parts.
    place:    first of ``least`` by (group, group, relation); negative where not yet computed.
    least:    the least seconds of sides up to those with as much memory, both in the order of their groups.
    """

    link: Link
    source: PartTable
    to: PartTable
    times: LinkTimes
    sides: tuple[Ints, Ints]
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

    def least_seconds(self, source: tuple[Ints, Ints], to: tuple[Ints, Ints], relations: Ints) -> Floats:
        """Return the least seconds between ends whose options fit, (n,); 0 where a part has no option on its mesh.

        ``source``, ``to``: the ``places`` of both.
        """
        (sources, last_source), (targets, last_target) = source, to
        place = self.place[sources, targets, relations]
        if (place < 0).any():
            self._fill(list(_distinct(place < 0, sources, targets, relations)))
            place = self.place[sources, targets, relations]
        return np.asarray(self.least[place + self.width[targets] * last_source + last_target])

    @cached_property
    def firsts(self) -> tuple[dict[int, int], ...]:
        """An end of each side, by its number, of both parts."""
        ends = (
            (numbers[each.some].tolist(), each.some.tolist())
            for numbers, each in zip(self.sides, self.alike, strict=True)
        )
        return tuple(dict(zip(*each, strict=True)) for each in ends)

    @cached_property
    def width(self) -> Ints:
        """Number of sides of the target in each group."""
        return np.diff(self.alike[1].first)

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


def link_table(link: Link, parts: Sequence[PartTable], source: LinkSides, to: LinkSides) -> LinkTable:
    """Return the table of a link. ``source``, ``to``: sides of its parts."""
    times = link.seconds if isinstance(link.seconds, LinkTimes) else LinkTimes(link.seconds)
    sides = _numbered(source, times.numbers[0]), _numbered(to, times.numbers[1])
    times.make_room()
    number = len(source.first) - 1
    place = np.full((number, number, len(RELATIONS)), -1)
    return LinkTable(link, parts[link.source], parts[link.to], times, sides, (source, to), place, np.zeros(0))


def _numbered(sides: LinkSides, numbers: dict[Hashable, int]) -> Ints:
    """Return the number of each end's side. ``numbers``: of known sides, to which those that are new are added."""
    known = [numbers.setdefault(side, len(numbers)) for side in sides.sides]
    return np.array(known, dtype=np.int64)[sides.side]


def link_sides(part: PartTable, side: LinkSide, groups: Ints, memory: float) -> LinkSides:
    """Return the sides of a part's ends, which are equal where a link takes as long.

    groups:  number of each shape's alike ones.
    memory:  bytes of the largest device.
    """
    numbers: dict[Hashable, int] = {}
    sides = np.array([numbers.setdefault(side(end), len(numbers)) for end in part.ends], dtype=np.int64)
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
    some = np.unique(sides, return_index=True)[1]
    return LinkSides(tuple(numbers), sides, some, groups, keys[ordered], leanest[ordered], first, memory)


@dataclass(eq=False)
class LinkTimes:
    """Times of a link, and those that have been computed: a sync or a row transfer may have it as its ``seconds``.

    seconds:  computes them.
    numbers:  number of each side of its source, and of its target.
    values:   time by (side, side, relation); NaN where not yet computed.
    """

    seconds: LinkSeconds
    numbers: tuple[dict[Hashable, int], dict[Hashable, int]] = field(default_factory=lambda: ({}, {}))
    values: NDArray[np.float64] = field(default_factory=lambda: np.full((0, 0, len(RELATIONS)), np.nan))

    def __call__(self, source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        return self.seconds(source, to, relation)

    def make_room(self) -> None:
        """Add the times of sides that are new."""
        missing = [len(numbers) - size for numbers, size in zip(self.numbers, self.values.shape, strict=False)]
        if any(missing):
            self.values = np.pad(self.values, [*((0, more) for more in missing), (0, 0)], constant_values=np.nan)
