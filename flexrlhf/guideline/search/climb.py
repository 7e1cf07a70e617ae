"""Plans to begin with: from a few plain ones, change one part at a time for the best as long as that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flexrlhf.guideline.search.found import Found
from flexrlhf.guideline.search.places import Places
from flexrlhf.guideline.search.tables import Ints, Tables

Spot = tuple[int, int]
"""A part's start and the position of its option."""


Height = tuple[float, float]
"""Bytes that are lacking, then seconds: lower is better."""


def climb(found: Found, places: Places, plan: list[Spot]) -> None:
    """Change one part after the other until no change of one helps."""
    best, part, since = (np.inf, np.inf), 0, 0
    while since < len(plan) and not found.is_late:
        height, spot = best_of_part(found, places, plan, part)
        since += 1
        if height < best:
            best, since, plan[part] = height, 1, spot
        part = (part + 1) % len(plan)


def best_of_part(found: Found, places: Places, plan: Sequence[Spot], part: int) -> tuple[Height, Spot]:
    """The fastest plan that differs from ``plan`` in one part alone."""
    tables = found.tables
    starts, options = spots(tables, places, plan, part)
    whole_starts = np.tile(np.array([spot[0] for spot in plan]), (len(starts), 1))
    whole_options = np.tile(np.array([spot[1] for spot in plan]), (len(starts), 1))
    whole_starts[:, part], whole_options[:, part] = starts, options
    seconds, over = found.offer(whole_starts, whole_options)
    row = int(np.argmin(seconds))
    height = 0.0, float(seconds[row])
    if not np.isfinite(seconds[row]):
        row = int(np.argmin(over))
        height = float(over[row]), np.inf
    return height, (int(starts[row]), int(options[row]))


def spots(tables: Tables, places: Places, plan: Sequence[Spot], part: int) -> tuple[Ints, Ints]:
    """(starts, options) of all that a part may be beside the others."""
    ends = []
    for other, (start, option) in enumerate(plan):
        if other != part:
            ends += [start, start + int(tables.parts[other].size[option])]
    starts, shapes = places.around(ends)
    return with_options(tables, part, starts, shapes)


def with_options(tables: Tables, part: int, starts: Ints, shapes: Ints) -> tuple[Ints, Ints]:
    """Each place with each option that the part has there."""
    first = tables.parts[part].first
    counts = first[shapes + 1] - first[shapes]
    offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts), np.repeat(first[shapes], counts) + offsets


def beginnings(tables: Tables, places: Places) -> Iterator[list[Spot]]:
    """Every part on the largest mesh it can have, in the fastest and in the leanest way; every part on half of it."""
    starts, shapes = places.every()
    for limit in (tables.num_devices, tables.num_devices // 2, tables.num_devices // 4):
        for by_memory in (False, True):
            plan = [_largest(tables, part, starts, shapes, limit, by_memory) for part in range(len(tables.parts))]
            if all(spot is not None for spot in plan):
                yield [spot for spot in plan if spot is not None]


def _largest(tables: Tables, part: int, starts: Ints, shapes: Ints, limit: int, by_memory: bool) -> Spot | None:
    table = tables.parts[part]
    has_options = table.first[shapes + 1] > table.first[shapes]
    fitting = np.flatnonzero(has_options & (tables.sizes[shapes] <= limit))
    if not len(fitting):
        return None
    place = fitting[np.lexsort((starts[fitting], -tables.sizes[shapes[fitting]]))[0]]
    choices = table.options_of(int(shapes[place]))
    cost = table.resting[choices] + table.active[choices] if by_memory else table.seconds[choices].sum(axis=1)
    return int(starts[place]), int(choices.start + np.argmin(cost))
