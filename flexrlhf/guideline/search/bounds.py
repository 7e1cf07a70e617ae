"""Lower bounds on the time of any completion of assignments of which only some parts are decided.

A step cannot be shorter than the longest cycle of waits, nor than the work of all calls spread over all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from flexrlhf.guideline.search.assignments import Overlaps, most_over, relations, rooms
from flexrlhf.guideline.search.cycles import Window, cycle_bound, windows_of
from flexrlhf.guideline.search.part_table import Bools, Floats, Ints
from flexrlhf.guideline.search.tables import Tables

UNDECIDED = -1
"""In place of the position of an option."""
WHOLE = Window(-1, -1, ())
"""Key of the whole step where areas are stored by window."""


@dataclass(frozen=True, eq=False)
class Floors:
    """Least figures of each part over the shapes that are still allowed: bounds for parts without a mesh.

    allowed:     shapes that each part may have, (parts, shapes).
    seconds:     least time of each task, by part.
    size:        least number of devices, by part.
    areas:       window → device time of its calls, (parts, shapes).
    least_area:  window → the least of them over the shapes, (parts,).
    columns:     window → columns of the seconds of each part that belong to its calls.
    """

    allowed: Bools
    seconds: tuple[Floats, ...]
    size: tuple[int, ...]
    areas: dict[Window, Floats]
    least_area: dict[Window, Floats]
    columns: dict[Window, list[list[int]]]


def areas_of(tables: Tables) -> dict[Window, Floats]:
    """Window → device time of its calls, (parts, shapes); infinite where a part has no option."""
    areas = {}
    for window in (WHOLE, *windows_of(tables.graph)):
        areas[window] = np.full((len(tables.parts), len(tables.shapes)), np.inf)
        for part, table in enumerate(tables.parts):
            area = table.seconds[:, columns_in(tables, window, part)].sum(axis=1) * table.size
            np.minimum.at(areas[window][part], table.shape, area)
    return areas


def columns_in(tables: Tables, window: Window, part: int) -> list[int]:
    """Columns of the part's seconds that belong to calls in ``window``."""
    graph = tables.graph
    calls = range(graph.num_calls) if window is WHOLE else window.between
    return [graph.column[call] for call in calls if graph.parts[call] == (part,) and graph.column[call] >= 0]


def floors_of(tables: Tables, areas: dict[Window, Floats], allowed: Bools) -> Floors:
    """Return the floors over ``allowed``, (parts, shapes). Every part must have a shape left."""
    seconds = tuple(part.least_seconds[allowed[p]].min(axis=0) for p, part in enumerate(tables.parts))
    size = tuple(int(tables.sizes[mask].min()) for mask in allowed)
    least = {w: np.where(allowed, area, np.inf).min(axis=1) for w, area in areas.items()}
    columns = {w: [columns_in(tables, w, part) for part in range(len(tables.parts))] for w in areas}
    return Floors(allowed, seconds, size, areas, least, columns)


@dataclass(frozen=True, eq=False)
class PartialAssignments:
    """Rows of assignments that are decided for some parts only.

    parts:    the parts that are decided, one a column of the others.
    starts:   first devices of their meshes, (n, parts).
    shapes:   shapes of their meshes, (n, parts).
    options:  positions of their options, or ``UNDECIDED``, (n, parts).
    border:   where ratios place the parts, the first device after the training side, or after all, (n,); negative: of
              the training side, which comes last. Else None.
    """

    parts: tuple[int, ...]
    starts: Ints
    shapes: Ints
    options: Ints
    border: Ints | None = None

    def rows(self, kept: Ints | Bools | slice) -> PartialAssignments:
        border = None if self.border is None else self.border[kept]
        return PartialAssignments(self.parts, self.starts[kept], self.shapes[kept], self.options[kept], border)

    def __len__(self) -> int:
        return len(self.starts)

    def figures(self, tables: Tables, figure: Literal["resting", "active"]) -> Floats:
        """Bytes of each part, (n, parts); the least where the option is undecided."""
        figures = np.empty(self.starts.shape)
        for column, part in enumerate(self.parts):
            table, options = tables.parts[part], self.options[:, column]
            exact, least = (
                (table.resting, table.least_resting) if figure == "resting" else (table.active, table.least_active)
            )
            figures[:, column] = np.where(options == UNDECIDED, least[self.shapes[:, column]], exact[options])
        return figures


def partial_bound(tables: Tables, floors: Floors, partial: PartialAssignments, goal: float) -> Floats:
    """Lower bound on the time of any completion of each row, (n,); infinite where a part has no option that fits.

    Above ``goal`` it leaves out the time of links, which takes longest to compute.
    """
    figures = _partial_figures(tables, floors, partial)
    bound = figures.bound(tables, floors)
    left = np.flatnonzero(bound < goal)
    if len(left):
        bound[left] = figures.rows(left).bound(tables, floors, has_links=True)
    return bound


def part_bound(tables: Tables, floors: Floors, part: int, shapes: Ints) -> Floats:
    """Lower bound on the time of any assignment with ``part`` on meshes of ``shapes``, wherever they are, (n,)."""
    columns = np.zeros((len(shapes), 1), dtype=np.int64)
    partial = PartialAssignments((part,), columns, shapes[:, None], columns + UNDECIDED)
    return _partial_figures(tables, floors, partial, is_anywhere=True).bound(tables, floors)


@dataclass(frozen=True, eq=False)
class _PartialFigures:
    """Figures of rows, from which their bounds follow.

    partial:  the rows.
    room:     bytes that the others leave to each part, (n, parts).
    seconds:  decided part → least time of each of its tasks, (n, tasks).
    fitting:  whether each part has an option that fits, (n,).
    areas:    window → device time of its calls, over the number of devices, (n,).
    """

    partial: PartialAssignments
    room: Floats
    seconds: dict[int, Floats]
    fitting: Bools
    areas: dict[Window, Floats]

    def rows(self, kept: Ints) -> _PartialFigures:
        if len(kept) == len(self.partial):
            return self
        seconds = {part: taken[kept] for part, taken in self.seconds.items()}
        areas = {window: area[kept] for window, area in self.areas.items()}
        return _PartialFigures(self.partial.rows(kept), self.room[kept], seconds, self.fitting[kept], areas)

    def bound(self, tables: Tables, floors: Floors, has_links: bool = False) -> Floats:
        """Return the bound of each row, (n,)."""
        graph, partial = tables.graph, self.partial
        seconds: list[Floats | float] = [0.0] * graph.num_calls
        for call, (mine, number) in enumerate(zip(graph.parts, graph.column, strict=True)):
            if number >= 0:
                decided = self.seconds.get(mine[0])
                seconds[call] = float(floors.seconds[mine[0]][number]) if decided is None else decided[:, number]
        delays: list[Floats | float] = [0.0] * len(tables.links)
        if has_links:
            delays = _link_bounds(tables, partial, self.room, seconds)
        overlaps = _overlaps(tables, floors, partial.parts, partial.starts, tables.sizes[partial.shapes])
        areas = {window: area for window, area in self.areas.items() if window is not WHOLE}
        bound = cycle_bound(graph, seconds, delays, overlaps, len(partial), areas)
        return np.where(self.fitting, np.maximum(bound, self.areas[WHOLE]), np.inf)


def _partial_figures(
    tables: Tables, floors: Floors, partial: PartialAssignments, is_anywhere: bool = False
) -> _PartialFigures:
    """Return the figures of rows. ``is_anywhere``: whether they hold wherever its parts are placed."""
    sizes = tables.sizes[partial.shapes]
    room = np.full(partial.starts.shape, tables.most_memory)
    if not is_anywhere:
        room = rooms(tables, partial.starts, sizes, partial.figures(tables, "resting"))
    seconds = _part_seconds(tables, partial, room)
    fitting: Bools = np.ones(len(partial), dtype=np.bool_)
    for part, taken in seconds.items():
        finite = np.isfinite(taken)
        if not finite.all():
            fitting &= finite.all(axis=1)
            seconds[part] = np.where(finite, taken, 0.0)
    areas = {w: _area(floors, w, partial, seconds, sizes) / tables.num_devices for w in floors.areas}
    return _PartialFigures(partial, room, seconds, fitting, areas)


def _part_seconds(tables: Tables, partial: PartialAssignments, room: Floats) -> dict[int, Floats]:
    """Decided part → least time of each of its tasks, (n, tasks), in the ``room`` that the others leave, (n, parts)."""
    seconds = {}
    for column, part in enumerate(partial.parts):
        table, options = tables.parts[part], partial.options[:, column]
        seconds[part] = table.by_memory.least(partial.shapes[:, column], room[:, column])
        decided = options != UNDECIDED
        if decided.any():
            seconds[part] = np.where(decided[:, None], table.seconds[options], seconds[part])
    return seconds


def _link_bounds(
    tables: Tables, partial: PartialAssignments, room: Floats, seconds: list[Floats | float]
) -> list[Floats | float]:
    """Least delay of each row transfer in the ``room`` of both ends, 0 where one is undecided. The least time of syncs
    goes into ``seconds``."""
    delays: list[Floats | float] = [0.0] * len(tables.links)
    starts, shapes, sizes = partial.starts, partial.shapes, tables.sizes[partial.shapes]
    # many links have the same ends
    related: dict[tuple[int, int], Ints] = {}
    places: dict[tuple[int, int], tuple[Ints, Ints]] = {}
    for index, table in enumerate(tables.links):
        if table.link.source not in partial.parts or table.link.to not in partial.parts:
            continue
        ends = a, b = partial.parts.index(table.link.source), partial.parts.index(table.link.to)
        if ends not in related:
            related[ends] = relations(starts[:, a], sizes[:, a], starts[:, b], sizes[:, b])
        for at, sides in zip(ends, table.alike, strict=True):
            if (at, id(sides)) not in places:
                places[at, id(sides)] = sides.places(shapes[:, at], room[:, at])
        least = table.least_seconds(places[a, id(table.alike[0])], places[b, id(table.alike[1])], related[ends])
        if table.link.call >= 0:
            seconds[table.link.call] = least
        else:
            delays[index] = least
    return delays


def _overlaps(tables: Tables, floors: Floors, parts: Sequence[int], starts: Ints, sizes: Ints) -> Overlaps:
    """Overlaps of decided parts; an undecided part shares a device with another where there is no room for both."""
    first, end = np.ascontiguousarray(starts.T), np.ascontiguousarray((starts + sizes).T)
    shared: Bools = first[:, None] < end[None, :]
    shared &= shared.transpose(1, 0, 2).copy()
    counts = shared.sum(axis=2).tolist()
    overlaps: dict[tuple[int, int], Bools | bool] = {}
    for i, j in combinations(range(len(parts)), 2):
        pair = min(parts[i], parts[j]), max(parts[i], parts[j])
        overlaps[pair] = shared[i, j] if 0 < counts[i][j] < len(starts) else counts[i][j] > 0
    undecided = [part for part in range(len(tables.parts)) if part not in parts]
    for position, part in enumerate(undecided):
        for other in undecided[position + 1 :]:
            overlaps[part, other] = floors.size[part] + floors.size[other] > tables.num_devices
        for column, decided in enumerate(parts):
            crowded: Bools = sizes[:, column] + floors.size[part] > tables.num_devices
            overlaps[min(part, decided), max(part, decided)] = crowded if crowded.any() else False
    return overlaps


def _area(
    floors: Floors, window: Window, partial: PartialAssignments, of_part: dict[int, Floats], sizes: Ints
) -> Floats:
    """Device time of the calls in ``window``, (n,). ``of_part``: decided part → its seconds."""
    area = np.zeros(len(partial))
    for part, by_shape in enumerate(floors.areas[window]):
        if part not in partial.parts:
            area += floors.least_area[window][part]
            continue
        column = partial.parts.index(part)
        taken = of_part[part][:, floors.columns[window][part]].sum(axis=1) * sizes[:, column]
        area += np.maximum(taken, by_shape[partial.shapes[:, column]])
    return area


def partial_over(tables: Tables, partial: PartialAssignments) -> Floats:
    """Bytes that a device lacks even with the leanest options, (n,); negative: it fits."""
    resting, active = partial.figures(tables, "resting"), partial.figures(tables, "active")
    return most_over(tables, partial.starts, tables.sizes[partial.shapes], resting, active)
