"""Options of a part as arrays: the fronts by shape, and the least times by shape and memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.search.problem import LinkEnd, MeshShape, Option, SearchPart

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
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
        position = fitting(self.keys, shapes, room / self.scale)
        seconds: Floats = self.seconds[np.maximum(position - 1, 0)]
        return np.where((position > self.first[shapes])[:, None], seconds, np.inf)


def fitting(keys: Floats, groups: Ints, room: Floats) -> Ints:
    """Return the positions among ``keys``, of groups and memory, after the last that fits into ``room`` devices."""
    # np.clip takes twice the time of both
    limits = groups * SHAPE_STEP + np.minimum(np.maximum(room + MEMORY_ROUNDING, -1.0), 1.5)
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


def part_table(part: SearchPart, shapes: Sequence[MeshShape], has_links: bool, memory: float) -> PartTable:
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
