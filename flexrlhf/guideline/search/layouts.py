"""Bounds on plans of which only the meshes of some parts are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flexrlhf.guideline.search.bounds import Overlaps, Window, cycle_bound, windows_of
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.plans import most_over, pairwise, relations, rooms
from flexrlhf.guideline.search.tables import Bools, Ints, Tables

WHOLE = Window(-1, -1, ())
"""Stands for the whole step where areas are kept by window."""


@dataclass(frozen=True, eq=False)
class Floors:
    """The least that a part can be, over the shapes that are still allowed: for parts without a mesh.

    ``areas``: device seconds of the calls in a window, by part and shape; ``least_area`` over shapes.
    """

    allowed: Bools
    seconds: tuple[Floats, ...]
    size: tuple[int, ...]
    areas: dict[Window, Floats]
    least_area: dict[Window, Floats]


def areas_of(tables: Tables) -> dict[Window, Floats]:
    """By window, part and shape: infinite where a part has no option."""
    found = {}
    for window in (WHOLE, *windows_of(tables.graph)):
        columns = [columns_in(tables, window, part) for part in range(len(tables.parts))]
        found[window] = np.stack([_areas(tables, part, mine) for part, mine in enumerate(columns)])
    return found


def columns_in(tables: Tables, window: Window, part: int) -> list[int]:
    """Which of the part's seconds are of calls in ``window``."""
    graph = tables.graph
    calls = range(graph.num_calls) if window is WHOLE else window.between
    return [graph.column[call] for call in calls if graph.parts[call] == (part,) and graph.column[call] >= 0]


def _areas(tables: Tables, part: int, columns: Sequence[int]) -> Floats:
    table = tables.parts[part]
    area = table.seconds[:, list(columns)].sum(axis=1) * table.size
    least = np.full(len(tables.shapes), np.inf)
    np.minimum.at(least, table.shape, area)
    return least


def floors_of(tables: Tables, areas: dict[Window, Floats], allowed: Bools) -> Floors:
    """``allowed``: by part and shape. Every part must have a shape left."""
    seconds = tuple(part.least_seconds[allowed[p]].min(axis=0) for p, part in enumerate(tables.parts))
    size = tuple(int(tables.sizes[mask].min()) for mask in allowed)
    least = {w: np.where(allowed, area, np.inf).min(axis=1) for w, area in areas.items()}
    return Floors(allowed, seconds, size, areas, least)


ANY = -1
"""In place of the position of an option: still to be chosen."""


@dataclass(frozen=True, eq=False)
class Placed:
    """Rows of plans of which only ``parts`` (columns) are known: where they lie and, unless ``ANY``, their options."""

    parts: tuple[int, ...]
    starts: Ints
    shapes: Ints
    options: Ints

    def rows(self, kept: Ints | Bools | slice) -> Placed:
        return Placed(self.parts, self.starts[kept], self.shapes[kept], self.options[kept])

    def __len__(self) -> int:
        return len(self.starts)

    def figures(self, tables: Tables, figure: Literal["resting", "active"]) -> Floats:
        """Of each part, the least where the option is open."""
        found = np.empty(self.starts.shape)
        for column, part in enumerate(self.parts):
            table, options = tables.parts[part], self.options[:, column]
            exact, least = (
                (table.resting, table.least_resting) if figure == "resting" else (table.active, table.least_active)
            )
            found[:, column] = np.where(options == ANY, least[self.shapes[:, column]], exact[options])
        return found


def layout_bound(tables: Tables, floors: Floors, placed: Placed, is_anywhere: bool = False) -> Floats:
    """What any plan takes in which the parts lie so; infinite where one has no option that fits beside the others.

    ``is_anywhere``: a single part, wherever it lies.
    """
    graph, sizes = tables.graph, tables.sizes[placed.shapes]
    column = {part: index for index, part in enumerate(placed.parts)}
    of_part = _part_seconds(tables, placed, sizes, is_anywhere)
    fitting: Bools = np.ones(len(placed), dtype=np.bool_)
    for part, taken in of_part.items():
        fitting &= np.isfinite(taken).all(axis=1)
        of_part[part] = np.where(np.isfinite(taken), taken, 0.0)
    seconds: list[Floats | float] = [0.0] * graph.num_calls
    for call, (mine, number) in enumerate(zip(graph.parts, graph.column, strict=True)):
        if number >= 0:
            part = mine[0]
            seconds[call] = of_part[part][:, number] if part in column else float(floors.seconds[part][number])
    delays = _link_bounds(tables, column, placed.starts, placed.shapes, seconds)
    overlaps = _overlaps(tables, floors, placed.parts, placed.starts, sizes)
    areas = {w: _area(tables, floors, w, placed, of_part, sizes) / tables.num_devices for w in floors.areas}
    whole = areas.pop(WHOLE)
    bound = np.maximum(cycle_bound(graph, seconds, delays, overlaps, len(placed), areas), whole)
    return np.where(fitting, bound, np.inf)


def _part_seconds(tables: Tables, placed: Placed, sizes: Ints, is_anywhere: bool) -> dict[int, Floats]:
    """The least seconds of each task of each part, with the memory that the others leave."""
    if is_anywhere:
        room = np.full(placed.starts.shape, max(memory for _, memory in tables.memory_at))
    else:
        room = rooms(tables, placed.starts, sizes, placed.figures(tables, "resting"))
    found = {}
    for column, part in enumerate(placed.parts):
        table, options = tables.parts[part], placed.options[:, column]
        least = table.caps.least(placed.shapes[:, column], room[:, column])
        found[part] = np.where((options == ANY)[:, None], least, table.seconds[options])
    return found


def _link_bounds(
    tables: Tables, column: dict[int, int], starts: Ints, shapes: Ints, seconds: list[Floats | float]
) -> list[Floats | float]:
    """Of rows; those of syncs go into ``seconds``. Nothing where one end is open."""
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
    """Of placed parts; two parts of which one is open share a device when there is no room for both."""
    overlaps = dict(pairwise(starts, sizes, parts))
    open_parts = [part for part in range(len(tables.parts)) if part not in parts]
    for position, part in enumerate(open_parts):
        for other in open_parts[position + 1 :]:
            overlaps[part, other] = floors.size[part] + floors.size[other] > tables.num_devices
        for column, placed in enumerate(parts):
            crowded: Bools = sizes[:, column] + floors.size[part] > tables.num_devices
            overlaps[min(part, placed), max(part, placed)] = crowded if crowded.any() else False
    return overlaps


def _area(
    tables: Tables, floors: Floors, window: Window, placed: Placed, of_part: dict[int, Floats], sizes: Ints
) -> Floats:
    """Device seconds of the calls in ``window``."""
    area = np.zeros(len(placed))
    for part, by_shape in enumerate(floors.areas[window]):
        if part not in placed.parts:
            area += floors.least_area[window][part]
            continue
        column = placed.parts.index(part)
        columns = columns_in(tables, window, part)
        taken = of_part[part][:, columns].sum(axis=1) * sizes[:, column]
        area += np.maximum(taken, by_shape[placed.shapes[:, column]])
    return area


def layout_over(tables: Tables, placed: Placed) -> Floats:
    """Bytes that a device lacks even in the leanest way (negative: it fits)."""
    resting, active = placed.figures(tables, "resting"), placed.figures(tables, "active")
    return most_over(tables, placed.starts, tables.sizes[placed.shapes], resting, active)
