"""Lower bounds on the time of any completion of assignments of which only some parts are decided.

A step cannot be shorter than any cycle of waits that comes back to where it began one step later: calls in list order
that share devices or read each other. It cannot be shorter than the work of all calls spread over all devices either,
nor than a call, then everything that must run between it and a second one spread over all devices, then the second one
and the way back (``Window``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from flexrlhf.guideline.search.assignments import (
    Overlaps,
    Wait,
    delay_to,
    most_over,
    pairwise,
    relations,
    rooms,
    wait_of,
)
from flexrlhf.guideline.search.evaluate import CallGraph
from flexrlhf.guideline.search.tables import Bools, Floats, Ints, Tables

UNDECIDED = -1
"""In place of the position of an option."""
Paths = dict[int, Floats]
"""Call → the longest way from the start of a first call to its end, (rows,)."""


@dataclass(frozen=True)
class Window:
    """Two calls, and the calls ``between`` that begin after ``first`` ends and end before ``last`` begins."""

    first: int
    last: int
    between: tuple[int, ...]


WHOLE = Window(-1, -1, ())
"""Key of the whole step where areas are stored by window."""


def windows_of(graph: CallGraph) -> tuple[Window, ...]:
    """Windows around calls of at least two parts that no other window contains."""
    after = _orders(graph)
    windows = []
    for first in range(graph.num_calls):
        for last in sorted(after[first]):
            between = tuple(k for k in sorted(after[first]) if last in after[k] and graph.column[k] >= 0)
            if len({graph.parts[k] for k in between}) > 1:
                windows.append(Window(first, last, between))
    return tuple(w for w in windows if not any(set(w.between) < set(other.between) for other in windows))


def _orders(graph: CallGraph) -> list[set[int]]:
    """Calls of the same turn that come after each call under every placement."""
    after: list[set[int]] = [set() for _ in range(graph.num_calls)]
    reads = {(edge.writer, edge.reader) for edge in graph.edges if edge.turns == 0}
    for call in reversed(range(graph.num_calls)):
        for later in range(call + 1, graph.num_calls):
            if graph.every[call] == graph.every[later] == 1 and (
                (call, later) in reads or set(graph.parts[call]) & set(graph.parts[later])
            ):
                after[call] |= {later, *after[later]}
    return after


def cycle_bound(
    graph: CallGraph,
    seconds: Sequence[Floats | float],
    delays: Sequence[Floats | float],
    overlaps: Overlaps,
    rows: int,
    areas: Mapping[Window, Floats | float],
) -> Floats:
    """Lower bound on the time of a step of each row, (rows,): the longest cycle of waits over the steps it spans.

    ``areas``: window → device time of the calls in between, over the number of devices.
    """
    waits = _Waits(graph, seconds, delays, _waits_of(graph, overlaps), rows)
    reached: dict[int, Paths] = {}
    zeros, bound = np.zeros(rows), np.zeros(rows)
    for first in reversed(waits.calls):
        # to the ends of the later calls of the same turn, and from there to the next
        reached[first] = waits.turn(waits.calls[waits.calls.index(first) + 1 :], {}, {first: zeros + seconds[first]})
        np.maximum(bound, waits.start(first, reached[first], {}), out=bound)
        for window, area in areas.items():
            if window.first == first:
                np.maximum(bound, seconds[first] + area + waits.start(first, reached[window.last], {}), out=bound)
    for first in sorted({edge.reader for edge in graph.edges if edge.turns} & set(waits.calls)):
        np.maximum(bound, waits.long_cycle(reached[first], first), out=bound)
    return bound


def _waits_of(graph: CallGraph, overlaps: Overlaps) -> list[list[Wait]]:
    """Return the wait of each call for each other: where they share a device, and for weights in the background by the
    calls that use them and by the next ones on their link."""
    distinct = set(graph.parts)
    of_parts = {(parts, others): wait_of(parts, others, overlaps) for parts in distinct for others in distinct}
    waits = [[of_parts[parts, others] for others in graph.parts] for parts in graph.parts]
    for other, filled in enumerate(graph.fills):
        for call, parts in enumerate(graph.parts):
            if filled >= 0 and (filled in parts or graph.fills[call] >= 0):
                waits[call][other] = 0.0
    return waits


@dataclass(frozen=True, eq=False)
class _Waits:
    """Longest paths through relaxed steps. Calls that are not due in every step are left out: no cycle gets longer.

    graph:    the calls.
    seconds:  of each call.
    delays:   time of each link.
    waits:    wait of each call for each other call.
    rows:     number of rows.
    """

    graph: CallGraph
    seconds: Sequence[Floats | float]
    delays: Sequence[Floats | float]
    waits: Sequence[Sequence[Wait]]
    rows: int

    @cached_property
    def calls(self) -> list[int]:
        return [call for call in range(self.graph.num_calls) if self.graph.every[call] == 1]

    def start(self, call: int, before: Paths, now: Paths) -> Floats:
        """Start of a call, after the calls of the turn ``before`` and of its own."""
        start = np.full(self.rows, -np.inf)
        for other, end in (*before.items(), *now.items()):
            delay_to(start, end, self.waits[call][other])
        for edge in self.graph.edges_to[call]:
            if edge.turns <= 1:
                written = (before if edge.turns else now).get(edge.writer)
                delay_to(start, written, self.delays[edge.rows] if edge.rows >= 0 else 0.0)
        return start

    def turn(self, calls: Iterable[int], before: Paths, now: Paths) -> Paths:
        """Return ``now`` with the ends of ``calls`` of the same turn, after the calls of the turn ``before``."""
        for call in calls:
            now[call] = self.start(call, before, now) + self.seconds[call]
        return now

    def long_cycle(self, paths: Paths, first: int) -> Floats:
        """Longest path from ``first`` back to it ``lag`` + 1 turns later, over those turns: through its reads of
        earlier turns."""
        before = paths
        for _ in range(self.graph.lag):
            before = self.turn(self.calls, before, {})
        now = self.turn((call for call in self.calls if call < first), before, {})
        return self.start(first, before, now) / (self.graph.lag + 1)


@dataclass(frozen=True, eq=False)
class Floors:
    """Least figures of each part over the shapes that are still allowed: bounds for parts without a mesh.

    allowed:     shapes that each part may have, (parts, shapes).
    seconds:     least time of each task, by part.
    size:        least number of devices, by part.
    areas:       window → device time of its calls, (parts, shapes).
    least_area:  window → the least of them over the shapes, (parts,).
    """

    allowed: Bools
    seconds: tuple[Floats, ...]
    size: tuple[int, ...]
    areas: dict[Window, Floats]
    least_area: dict[Window, Floats]


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
    return Floors(allowed, seconds, size, areas, least)


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
    bound = _bound(tables, floors, partial)
    left = np.flatnonzero(bound < goal)
    if len(left):
        bound[left] = _bound(tables, floors, partial.rows(left), has_links=True)
    return bound


def part_bound(tables: Tables, floors: Floors, part: int, shapes: Ints) -> Floats:
    """Lower bound on the time of any assignment with ``part`` on meshes of ``shapes``, wherever they are, (n,)."""
    columns = np.zeros((len(shapes), 1), dtype=np.int64)
    partial = PartialAssignments((part,), columns, shapes[:, None], columns + UNDECIDED)
    return _bound(tables, floors, partial, is_anywhere=True)


def _bound(
    tables: Tables,
    floors: Floors,
    partial: PartialAssignments,
    has_links: bool = False,
    is_anywhere: bool = False,
) -> Floats:
    """Return the bound of each row, (n,). ``is_anywhere``: whether it holds wherever its parts are placed."""
    graph, sizes = tables.graph, tables.sizes[partial.shapes]
    column = {part: index for index, part in enumerate(partial.parts)}
    room = np.full(partial.starts.shape, tables.most_memory)
    if not is_anywhere:
        room = rooms(tables, partial.starts, sizes, partial.figures(tables, "resting"))
    of_part = _part_seconds(tables, partial, room)
    fitting: Bools = np.ones(len(partial), dtype=np.bool_)
    for part, taken in of_part.items():
        fitting &= np.isfinite(taken).all(axis=1)
        of_part[part] = np.where(np.isfinite(taken), taken, 0.0)
    seconds: list[Floats | float] = [0.0] * graph.num_calls
    for call, (mine, number) in enumerate(zip(graph.parts, graph.column, strict=True)):
        if number >= 0:
            part = mine[0]
            seconds[call] = of_part[part][:, number] if part in column else float(floors.seconds[part][number])
    delays: list[Floats | float] = [0.0] * len(tables.links)
    if has_links:
        delays = _link_bounds(tables, column, partial, room, seconds)
    overlaps = _overlaps(tables, floors, partial.parts, partial.starts, sizes)
    areas = {w: _area(tables, floors, w, partial, of_part, sizes) / tables.num_devices for w in floors.areas}
    whole = areas.pop(WHOLE)
    bound = np.maximum(cycle_bound(graph, seconds, delays, overlaps, len(partial), areas), whole)
    return np.where(fitting, bound, np.inf)


def _part_seconds(tables: Tables, partial: PartialAssignments, room: Floats) -> dict[int, Floats]:
    """Decided part → least time of each of its tasks, (n, tasks), in the ``room`` that the others leave, (n, parts)."""
    seconds = {}
    for column, part in enumerate(partial.parts):
        table, options = tables.parts[part], partial.options[:, column]
        least = table.by_memory.least(partial.shapes[:, column], room[:, column])
        seconds[part] = np.where((options == UNDECIDED)[:, None], least, table.seconds[options])
    return seconds


def _link_bounds(
    tables: Tables,
    column: dict[int, int],
    partial: PartialAssignments,
    room: Floats,
    seconds: list[Floats | float],
) -> list[Floats | float]:
    """Least delay of each row transfer in the ``room`` of both ends, 0 where one is undecided. The least time of syncs
    goes into ``seconds``."""
    delays: list[Floats | float] = [0.0] * len(tables.links)
    starts, shapes, sizes = partial.starts, partial.shapes, tables.sizes[partial.shapes]
    for index, table in enumerate(tables.links):
        if table.link.source not in column or table.link.to not in column:
            continue
        a, b = column[table.link.source], column[table.link.to]
        relation = relations(starts[:, a], sizes[:, a], starts[:, b], sizes[:, b])
        least = table.least_seconds((shapes[:, a], shapes[:, b]), relation, (room[:, a], room[:, b]))
        if table.link.call >= 0:
            seconds[table.link.call] = least
        else:
            delays[index] = least
    return delays


def _overlaps(tables: Tables, floors: Floors, parts: Sequence[int], starts: Ints, sizes: Ints) -> Overlaps:
    """Overlaps of decided parts; an undecided part shares a device with another where there is no room for both."""
    overlaps = dict(pairwise([*starts.T], [*sizes.T], parts))
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
    """Device time of the calls in ``window``, (n,). ``of_part``: decided part → its seconds."""
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
