"""Lower bounds on assignments of which only the meshes of some parts are decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flexrlhf.guideline.search.assignments import most_over, pairwise, relations, rooms
from flexrlhf.guideline.search.bounds import Overlaps, Window, cycle_bound, windows_of
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.tables import Bools, Ints, Tables

WHOLE = Window(-1, -1, ())
"""Key of the whole step where areas are stored by window."""


@dataclass(frozen=True, eq=False)
class Floors:
    """Least figures of each part over the shapes that are still allowed: bounds for parts without a mesh.

    allowed:     shapes that each part may have, (parts, shapes).
    seconds:     least seconds of each task, by part.
    size:        least number of devices, by part.
    areas:       window → device seconds of its calls, (parts, shapes).
    least_area:  window → the least of them over the shapes, (parts,).
    """

    allowed: Bools
    seconds: tuple[Floats, ...]
    size: tuple[int, ...]
    areas: dict[Window, Floats]
    least_area: dict[Window, Floats]


def areas_of(tables: Tables) -> dict[Window, Floats]:
    """Window → device seconds of its calls, (parts, shapes); infinite where a part has no option."""
    areas = {}
    for window in (WHOLE, *windows_of(tables.graph)):
        columns = [columns_in(tables, window, part) for part in range(len(tables.parts))]
        areas[window] = np.stack([_areas(tables, part, mine) for part, mine in enumerate(columns)])
    return areas


def columns_in(tables: Tables, window: Window, part: int) -> list[int]:
    """Columns of the part's seconds that belong to calls in ``window``."""
    graph = tables.graph
    calls = range(graph.num_calls) if window is WHOLE else window.between
    return [graph.column[call] for call in calls if graph.parts[call] == (part,) and graph.column[call] >= 0]


def _areas(tables: Tables, part: int, columns: Sequence[int]) -> Floats:
    """Least device seconds of ``columns`` by shape."""
    table = tables.parts[part]
    area = table.seconds[:, list(columns)].sum(axis=1) * table.size
    least = np.full(len(tables.shapes), np.inf)
    np.minimum.at(least, table.shape, area)
    return least


def floors_of(tables: Tables, areas: dict[Window, Floats], allowed: Bools) -> Floors:
    """Return the floors over ``allowed``, (parts, shapes). Every part must have a shape left."""
    seconds = tuple(part.least_seconds[allowed[p]].min(axis=0) for p, part in enumerate(tables.parts))
    size = tuple(int(tables.sizes[mask].min()) for mask in allowed)
    least = {w: np.where(allowed, area, np.inf).min(axis=1) for w, area in areas.items()}
    return Floors(allowed, seconds, size, areas, least)


UNDECIDED = -1
"""In place of the position of an option."""


@dataclass(frozen=True, eq=False)
class PartialAssignments:
    """Rows of assignments that are decided for some parts only.

    parts:    the parts that are decided, one a column of the others.
    starts:   first devices of their meshes, (n, parts).
    shapes:   shapes of their meshes, (n, parts).
    options:  positions of their options, or ``UNDECIDED``, (n, parts).
    """

    parts: tuple[int, ...]
    starts: Ints
    shapes: Ints
    options: Ints

    def rows(self, kept: Ints | Bools | slice) -> PartialAssignments:
        return PartialAssignments(self.parts, self.starts[kept], self.shapes[kept], self.options[kept])

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


def partial_bound(tables: Tables, floors: Floors, partial: PartialAssignments, is_anywhere: bool = False) -> Floats:
    """Lower bound on the seconds of any completion of each row, (n,); infinite where a part has no option that fits.

    ``is_anywhere``: the rows have a single part, and hold wherever it is placed.
    """
    graph, sizes = tables.graph, tables.sizes[partial.shapes]
    column = {part: index for index, part in enumerate(partial.parts)}
    of_part = _part_seconds(tables, partial, sizes, is_anywhere)
    fitting: Bools = np.ones(len(partial), dtype=np.bool_)
    for part, taken in of_part.items():
        fitting &= np.isfinite(taken).all(axis=1)
        of_part[part] = np.where(np.isfinite(taken), taken, 0.0)
    seconds: list[Floats | float] = [0.0] * graph.num_calls
    for call, (mine, number) in enumerate(zip(graph.parts, graph.column, strict=True)):
        if number >= 0:
            part = mine[0]
            seconds[call] = of_part[part][:, number] if part in column else float(floors.seconds[part][number])
    delays = _link_bounds(tables, column, partial.starts, partial.shapes, seconds)
    overlaps = _overlaps(tables, floors, partial.parts, partial.starts, sizes)
    areas = {w: _area(tables, floors, w, partial, of_part, sizes) / tables.num_devices for w in floors.areas}
    whole = areas.pop(WHOLE)
    bound = np.maximum(cycle_bound(graph, seconds, delays, overlaps, len(partial), areas), whole)
    return np.where(fitting, bound, np.inf)


def _part_seconds(tables: Tables, partial: PartialAssignments, sizes: Ints, is_anywhere: bool) -> dict[int, Floats]:
    """Decided part → least seconds of each of its tasks, (n, tasks), with the memory that the others leave."""
    if is_anywhere:
        room = np.full(partial.starts.shape, max(memory for _, memory in tables.memory_at))
    else:
        room = rooms(tables, partial.starts, sizes, partial.figures(tables, "resting"))
    seconds = {}
    for column, part in enumerate(partial.parts):
        table, options = tables.parts[part], partial.options[:, column]
        least = table.by_memory.least(partial.shapes[:, column], room[:, column])
        seconds[part] = np.where((options == UNDECIDED)[:, None], least, table.seconds[options])
    return seconds


def _link_bounds(
    tables: Tables, column: dict[int, int], starts: Ints, shapes: Ints, seconds: list[Floats | float]
) -> list[Floats | float]:
    """Least delay of each row transfer, 0 where one end is undecided. Least seconds of syncs go into ``seconds``."""
    delays: list[Floats | float] = [0.0] * len(tables.links)
    for index, table in enumerate(tables.links):
        if table.link.source not in column or table.link.to not in column:
            continue
        a, b = column[table.link.source], column[table.link.to]
        sizes = tables.sizes[shapes]
        relation = relations(starts[:, a], sizes[:, a], starts[:, b], sizes[:, b])
        least = table.least_seconds(shapes[:, a], shapes[:, b], relation)
        if table.link.call >= 0:
            seconds[table.link.call] = least
        else:
            delays[index] = least
    return delays


def _overlaps(tables: Tables, floors: Floors, parts: Sequence[int], starts: Ints, sizes: Ints) -> Overlaps:
    """Overlaps of decided parts; an undecided part shares a device with another where there is no room for both."""
    overlaps = dict(pairwise(starts, sizes, parts))
    undecided = [part for part in range(len(tables.parts)) if part not in parts]
    for position, part in enumerate(undecided):
        for other in undecided[position + 1 :]:
            overlaps[part, other] = floors.size[part] + floors.size[other] > tables.num_devices
        for column, decided in enumerate(parts):
            crowded: Bools = sizes[:, column] + floors.size[part] > tables.num_devices
            overlaps[min(part, decided), max(part, decided)] = crowded if crowded.any() else False
    return overlaps


def _area(
    tables: Tables,
    floors: Floors,
    window: Window,
    partial: PartialAssignments,
    of_part: dict[int, Floats],
    sizes: Ints,
) -> Floats:
    """Device seconds of the calls in ``window``, (n,). ``of_part``: decided part → its seconds."""
    area = np.zeros(len(partial))
    for part, by_shape in enumerate(floors.areas[window]):
        if part not in partial.parts:
            area += floors.least_area[window][part]
            continue
        column = partial.parts.index(part)
        columns = columns_in(tables, window, part)
        taken = of_part[part][:, columns].sum(axis=1) * sizes[:, column]
        area += np.maximum(taken, by_shape[partial.shapes[:, column]])
    return area


def partial_over(tables: Tables, partial: PartialAssignments) -> Floats:
    """Bytes that a device lacks even with the leanest options, (n,); negative: it fits."""
    resting, active = partial.figures(tables, "resting"), partial.figures(tables, "active")
    return most_over(tables, partial.starts, tables.sizes[partial.shapes], resting, active)
