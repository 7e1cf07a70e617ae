"""Fastest options on given meshes: branch and bound over parts, on arrays.

Arguments that functions share:

meshes:  the meshes of all parts.
sets:    the options that each part may still have.
chosen:  the parts that are decided.
rows:    an option of each part that is decided, (n, parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexrlhf.guideline.search.assignments import ROUNDING, pairwise, relations
from flexrlhf.guideline.search.bounds import Overlaps, clock, cycle_bound
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.partial_assignments import UNDECIDED
from flexrlhf.guideline.search.state import SearchState
from flexrlhf.guideline.search.tables import Bools, Ints, LinkTable, Tables

CHUNK = 4096
"""Rows that are expanded at once."""


@dataclass(frozen=True, eq=False)
class MeshAssignment:
    """The meshes of all parts.

    tables:    the problem.
    starts:    first device of each part.
    shapes:    shape of each part's mesh.
    options:   option of each part, or ``UNDECIDED``.
    overlaps:  which parts share a device.
    relation:  relation of the ends of each link.
    crowds:    (parts on one device, its memory), of the devices that differ.
    """

    tables: Tables
    starts: tuple[int, ...]
    shapes: tuple[int, ...]
    options: tuple[int, ...]
    overlaps: Overlaps
    relation: tuple[int, ...]
    crowds: tuple[tuple[tuple[int, ...], float], ...]


def mesh_assignment(
    tables: Tables, starts: Sequence[int], shapes: Sequence[int], options: Sequence[int]
) -> MeshAssignment:
    """Return the assignment with its relations, overlaps and groups of parts that share devices.

    starts, shapes, options:  of each part: first device, number of the mesh shape, number of the option.
    """
    first, size = np.array([starts]), tables.sizes[np.array([shapes])]
    relation = []
    for table in tables.links:
        a, b = table.link.source, table.link.to
        relation.append(int(relations(first[0, a], size[0, a], first[0, b], size[0, b])))
    overlaps = pairwise(first, size, range(len(starts)))
    points = sorted({*starts, *(run for run, _ in tables.memory_at)})
    crowds = {_crowd(tables, starts, size[0].tolist(), point) for point in points}
    return MeshAssignment(
        tables, tuple(starts), tuple(shapes), tuple(options), overlaps, tuple(relation), tuple(sorted(crowds))
    )


def _crowd(tables: Tables, starts: Sequence[int], sizes: Sequence[int], point: int) -> tuple[tuple[int, ...], float]:
    """(parts on the device ``point``, its memory)."""
    spans = enumerate(zip(starts, sizes, strict=True))
    return tuple(part for part, (start, size) in spans if start <= point < start + size), tables.memory_of(point)


def search_options(state: SearchState, meshes: MeshAssignment) -> float:
    """Store the best assignments on ``meshes``. Least bound of what is left at the limit, else infinite."""
    state.count(1)
    sets = _fitting(meshes)
    if sets is None:
        state.pruned_by_memory += 1
        return np.inf
    order = _order(meshes.tables, sets)
    start = _bound(meshes, sets, [], _blank(sets))
    if not len(state.below_goal(start)):
        return np.inf
    stack: list[tuple[int, Ints, Floats]] = [(0, _blank(sets), start)]
    while stack:
        if state.is_exhausted:
            return float(min(bounds.min() for _, _, bounds in stack))
        level, rows, bounds = stack.pop()
        rows = rows[state.below_goal(bounds)]
        if not len(rows):
            continue
        if level == len(order):
            _time(state, meshes, rows)
            continue
        rows = _expand(rows, order[level], sets[order[level]])
        state.count(len(rows))
        fitting = _fits(meshes, sets, order[: level + 1], rows)
        state.pruned_by_memory += len(rows) - int(fitting.sum())
        rows = rows[fitting]
        bounds = _bound(meshes, sets, order[: level + 1], rows)
        kept = state.below_goal(bounds)
        pieces = [kept[at : at + CHUNK] for at in range(0, len(kept), CHUNK)]
        stack += [(level + 1, rows[piece], bounds[piece]) for piece in reversed(pieces)]
    return np.inf


def _order(tables: Tables, sets: Sequence[Ints]) -> list[int]:
    """Parts in the order of branching: both ends of a link in sequence, since its seconds follow from both."""
    spread = [float(np.ptp(_total(tables, part, options))) for part, options in enumerate(sets)]
    links = [(table.link.source, table.link.to) for table in tables.links]
    links.sort(key=lambda link: (-spread[link[0]] - spread[link[1]], link))
    rest = sorted(range(len(sets)), key=lambda part: (-spread[part], part))
    return list(dict.fromkeys([*(part for link in links for part in link), *rest]))


def _total(tables: Tables, part: int, options: Ints) -> Floats:
    """Seconds of all tasks of a part, by option."""
    return np.asarray(tables.parts[part].seconds[options].sum(axis=1))


def _fitting(meshes: MeshAssignment) -> list[Ints] | None:
    """Options of each part that fit together with the leanest of the others; None where a part has none."""
    tables = meshes.tables
    sets = [_stated(tables, *chosen) for chosen in enumerate(zip(meshes.shapes, meshes.options, strict=True))]
    changed = True
    while changed:
        changed = False
        if any(not len(options) for options in sets):
            return None
        for part in range(len(sets)):
            kept = sets[part][_fits(meshes, sets, [part], _expand(_blank(sets), part, sets[part]))]
            changed |= len(kept) < len(sets[part])
            sets[part] = kept
            if not len(kept):
                return None
    return sets


def _stated(tables: Tables, part: int, chosen: tuple[int, int]) -> Ints:
    """All options of a shape, or the one that is decided. ``chosen``: (shape, option)."""
    shape, option = chosen
    stated = tables.parts[part].options_of(shape)
    return np.arange(stated.start, stated.stop) if option == UNDECIDED else np.array([option])


def _blank(sets: Sequence[Ints]) -> Ints:
    """Return one row in which no part is decided."""
    return np.zeros((1, len(sets)), dtype=np.int64)


def _expand(rows: Ints, part: int, options: Ints) -> Ints:
    """Each row with each of ``options`` for ``part``."""
    expanded = np.repeat(rows, len(options), axis=0)
    expanded[:, part] = np.tile(options, len(rows))
    return expanded


def _fits(meshes: MeshAssignment, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> Bools:
    """Whether each row fits with the leanest options of parts that are not ``chosen``, (n,)."""
    fitting: Bools = np.ones(len(rows), dtype=np.bool_)
    for parts, memory in meshes.crowds:
        resting, active = np.zeros(len(rows)), np.zeros(len(rows))
        for part in parts:
            table = meshes.tables.parts[part]
            if part in chosen:
                resting += table.resting[rows[:, part]]
                np.maximum(active, table.active[rows[:, part]], out=active)
            else:
                resting += table.resting[sets[part]].min()
                np.maximum(active, table.active[sets[part]].min(initial=np.inf), out=active)
        fitting &= resting + active <= memory * (1 + ROUNDING)
    return fitting


def _bound(meshes: MeshAssignment, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> Floats:
    """Lower bound on the seconds of any completion of each row, (n,)."""
    graph, seconds = meshes.tables.graph, _seconds(meshes, sets, chosen, rows)
    delays = _links(meshes, sets, chosen, rows, seconds)
    return cycle_bound(graph, seconds, delays, meshes.overlaps, len(rows), {})


def _seconds(meshes: MeshAssignment, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> list[Floats | float]:
    """Seconds of each task, the least where its part is undecided; 0 for syncs."""
    graph = meshes.tables.graph
    seconds: list[Floats | float] = [0.0] * graph.num_calls
    for call, (parts, column) in enumerate(zip(graph.parts, graph.column, strict=True)):
        if column >= 0:
            table = meshes.tables.parts[parts[0]]
            is_chosen = parts[0] in chosen
            taken = table.seconds[rows[:, parts[0]] if is_chosen else sets[parts[0]], column]
            seconds[call] = taken if is_chosen else float(taken.min())
    return seconds


def _links(
    meshes: MeshAssignment, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints, seconds: list[Floats | float]
) -> list[Floats | float]:
    """Delay of each row transfer, the least where an end is undecided. Those of syncs go into ``seconds``."""
    delays: list[Floats | float] = [0.0] * len(meshes.relation)
    for index, (table, relation) in enumerate(zip(meshes.tables.links, meshes.relation, strict=True)):
        taken = _link(table, np.array([relation]), sets, chosen, rows)
        if table.link.call >= 0:
            seconds[table.link.call] = taken
        else:
            delays[index] = taken
    return delays


def _link(table: LinkTable, relation: Ints, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> Floats:
    """Seconds of a link, the least over the options of an end that is undecided, (n,) or (1,)."""
    a, b = table.link.source, table.link.to
    if a in chosen and b in chosen:
        return table.seconds(table.source.end[rows[:, a]], table.to.end[rows[:, b]], relation)
    sources, targets = np.unique(table.source.end[sets[a]]), np.unique(table.to.end[sets[b]])
    between = table.seconds(sources[:, None], targets[None, :], relation[:, None])
    if a in chosen:
        return np.asarray(between.min(axis=1)[np.searchsorted(sources, table.source.end[rows[:, a]])])
    if b in chosen:
        return np.asarray(between.min(axis=0)[np.searchsorted(targets, table.to.end[rows[:, b]])])
    return np.asarray(between.min(keepdims=True)[0])


def _time(state: SearchState, meshes: MeshAssignment, rows: Ints) -> None:
    """Time whole assignments and store the best."""
    zeros, parts = np.zeros(len(rows)), range(len(meshes.starts))
    seconds = _seconds(meshes, [], parts, rows)
    delays = _links(meshes, [], parts, rows, seconds)
    values = clock(
        meshes.tables.graph, [zeros + s for s in seconds], [zeros + d for d in delays], meshes.overlaps, len(rows)
    )
    state.evaluated += len(rows)
    state.accept(values, np.tile(np.array(meshes.starts), (len(rows), 1)), rows)
