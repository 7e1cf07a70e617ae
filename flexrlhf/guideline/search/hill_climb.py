"""First assignments: from a few plain ones, change one part at a time for the best as long as that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flexrlhf.guideline.search.problem import Assignment, Option
from flexrlhf.guideline.search.state import SearchState
from flexrlhf.guideline.search.symmetry import DistinctMeshes
from flexrlhf.guideline.search.tables import Ints, PartTable, Tables

Spot = tuple[int, int]
"""A part's start and the position of its option."""


Height = tuple[float, float]
"""Bytes that are lacking, then seconds: lower is better."""


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
    tables = state.tables
    starts, options = spots_of_part(tables, meshes, spots, part)
    whole_starts = np.tile(np.array([spot[0] for spot in spots]), (len(starts), 1))
    whole_options = np.tile(np.array([spot[1] for spot in spots]), (len(starts), 1))
    whole_starts[:, part], whole_options[:, part] = starts, options
    seconds, over = state.offer(whole_starts, whole_options)
    row = int(np.argmin(seconds))
    height = 0.0, float(seconds[row])
    if not np.isfinite(seconds[row]):
        row = int(np.argmin(over))
        height = float(over[row]), np.inf
    return height, (int(starts[row]), int(options[row]))


def spots_of_part(tables: Tables, meshes: DistinctMeshes, spots: Sequence[Spot], part: int) -> tuple[Ints, Ints]:
    """(starts, options) of all spots of a part, given those of the others."""
    ends = []
    for other, (start, option) in enumerate(spots):
        if other != part:
            ends += [start, start + int(tables.parts[other].size[option])]
    starts, shapes = meshes.around(ends)
    return with_options(tables, part, starts, shapes)


def with_options(tables: Tables, part: int, starts: Ints, shapes: Ints) -> tuple[Ints, Ints]:
    """Pair each mesh with each option that the part has there: (starts, options)."""
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
