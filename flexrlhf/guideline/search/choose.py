"""The fastest options on meshes that are known: branch and bound over parts, on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexrlhf.guideline.search.bounds import Overlaps, clock, cycle_bound
from flexrlhf.guideline.search.found import Found
from flexrlhf.guideline.search.layouts import ANY
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.plans import ROUNDING, pairwise, relations
from flexrlhf.guideline.search.tables import Bools, Ints, LinkTable, Tables

CHUNK = 4096
"""Rows that are opened at once."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The meshes of all parts, and their options unless ``ANY``. ``crowds``: (parts on one device, its memory).
    ``relation``: of each link's ends."""

    tables: Tables
    starts: tuple[int, ...]
    shapes: tuple[int, ...]
    options: tuple[int, ...]
    overlaps: Overlaps
    relation: tuple[int, ...]
    crowds: tuple[tuple[tuple[int, ...], float], ...]


def layout_of(tables: Tables, starts: Sequence[int], shapes: Sequence[int], options: Sequence[int]) -> Layout:
    first, size = np.array([starts]), tables.sizes[np.array([shapes])]
    relation = []
    for table in tables.links:
        a, b = table.link.source, table.link.to
        relation.append(int(relations(first[0, a], size[0, a], first[0, b], size[0, b])))
    overlaps = pairwise(first, size, range(len(starts)))
    points = sorted({*starts, *(run for run, _ in tables.memory_at)})
    crowds = {_crowd(tables, starts, size[0].tolist(), point) for point in points}
    return Layout(
        tables, tuple(starts), tuple(shapes), tuple(options), overlaps, tuple(relation), tuple(sorted(crowds))
    )


def _crowd(tables: Tables, starts: Sequence[int], sizes: Sequence[int], point: int) -> tuple[tuple[int, ...], float]:
    spans = enumerate(zip(starts, sizes, strict=True))
    return tuple(part for part, (start, size) in spans if start <= point < start + size), tables.memory_of(point)


def choose(found: Found, layout: Layout) -> float:
    """Offer the best plans of a layout. The least bound of what is left when the time is up (else infinite)."""
    tables = layout.tables
    sets = _fitting(layout)
    if sets is None:
        found.pruned_by_memory += 1
        return np.inf
    order = _order(tables, sets)
    start = _bound(layout, sets, [], np.zeros((1, len(sets)), dtype=np.int64))
    if not len(found.below_goal(start)):
        return np.inf
    stack: list[tuple[int, Ints, Floats]] = [(0, np.zeros((1, len(sets)), dtype=np.int64), start)]
    while stack:
        if found.is_late:
            return float(min(bounds.min() for _, _, bounds in stack))
        level, rows, bounds = stack.pop()
        rows = rows[found.below_goal(bounds)]
        if not len(rows):
            continue
        if level == len(order):
            _time(found, layout, rows)
            continue
        rows = _open(rows, order[level], sets[order[level]])
        fitting = _fits(layout, sets, order[: level + 1], rows)
        found.pruned_by_memory += len(rows) - int(fitting.sum())
        rows = rows[fitting]
        bounds = _bound(layout, sets, order[: level + 1], rows)
        kept = found.below_goal(bounds)
        pieces = [kept[at : at + CHUNK] for at in range(0, len(kept), CHUNK)]
        stack += [(level + 1, rows[piece], bounds[piece]) for piece in reversed(pieces)]
    return np.inf


def _order(tables: Tables, sets: Sequence[Ints]) -> list[int]:
    """Ends of links first, one after the other, since what they take is known with both."""
    spread = [float(np.ptp(_total(tables, part, options))) for part, options in enumerate(sets)]
    links = [(table.link.source, table.link.to) for table in tables.links]
    links.sort(key=lambda link: (-spread[link[0]] - spread[link[1]], link))
    rest = sorted(range(len(sets)), key=lambda part: (-spread[part], part))
    return list(dict.fromkeys([*(part for link in links for part in link), *rest]))


def _total(tables: Tables, part: int, options: Ints) -> Floats:
    return np.asarray(tables.parts[part].seconds[options].sum(axis=1))


def _fitting(layout: Layout) -> list[Ints] | None:
    """By part the options that fit beside the leanest of the others; None where one has none."""
    tables = layout.tables
    sets = [_stated(tables, *chosen) for chosen in enumerate(zip(layout.shapes, layout.options, strict=True))]
    changed = True
    while changed:
        changed = False
        if any(not len(options) for options in sets):
            return None
        for part in range(len(sets)):
            kept = sets[part][_fits(layout, sets, [part], _open(_blank(sets), part, sets[part]))]
            changed |= len(kept) < len(sets[part])
            sets[part] = kept
            if not len(kept):
                return None
    return sets


def _stated(tables: Tables, part: int, chosen: tuple[int, int]) -> Ints:
    """All options of a shape, or the one that is chosen."""
    shape, option = chosen
    found = tables.parts[part].options_of(shape)
    return np.arange(found.start, found.stop) if option == ANY else np.array([option])


def _blank(sets: Sequence[Ints]) -> Ints:
    return np.zeros((1, len(sets)), dtype=np.int64)


def _open(rows: Ints, part: int, options: Ints) -> Ints:
    """Each row with each option."""
    opened = np.repeat(rows, len(options), axis=0)
    opened[:, part] = np.tile(options, len(rows))
    return opened


def _fits(layout: Layout, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> Bools:
    """With the leanest options of parts that are not ``chosen``."""
    good: Bools = np.ones(len(rows), dtype=np.bool_)
    for parts, memory in layout.crowds:
        resting, active = np.zeros(len(rows)), np.zeros(len(rows))
        for part in parts:
            table = layout.tables.parts[part]
            is_chosen = part in chosen
            resting += table.resting[rows[:, part]] if is_chosen else table.resting[sets[part]].min()
            np.maximum(active, table.active[rows[:, part] if is_chosen else sets[part]].min(initial=np.inf)
                       if not is_chosen else table.active[rows[:, part]], out=active)  # fmt: skip
        good &= resting + active <= memory * (1 + ROUNDING)
    return good


def _bound(layout: Layout, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> Floats:
    """What any completion of each row takes."""
    graph, seconds = layout.tables.graph, _seconds(layout, sets, chosen, rows)
    delays = _links(layout, sets, chosen, rows, seconds)
    return cycle_bound(graph, seconds, delays, layout.overlaps, len(rows), {})


def _seconds(layout: Layout, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> list[Floats | float]:
    graph = layout.tables.graph
    seconds: list[Floats | float] = [0.0] * graph.num_calls
    for call, (parts, column) in enumerate(zip(graph.parts, graph.column, strict=True)):
        if column >= 0:
            table = layout.tables.parts[parts[0]]
            is_chosen = parts[0] in chosen
            taken = table.seconds[rows[:, parts[0]] if is_chosen else sets[parts[0]], column]
            seconds[call] = taken if is_chosen else float(taken.min())
    return seconds


def _links(
    layout: Layout, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints, seconds: list[Floats | float]
) -> list[Floats | float]:
    """Of rows, the least where an end is open; those of syncs go into ``seconds``."""
    delays: list[Floats | float] = [0.0] * len(layout.relation)
    for index, (table, relation) in enumerate(zip(layout.tables.links, layout.relation, strict=True)):
        taken = _link(table, np.array([relation]), sets, chosen, rows)
        if table.link.call >= 0:
            seconds[table.link.call] = taken
        else:
            delays[index] = taken
    return delays


def _link(table: LinkTable, relation: Ints, sets: Sequence[Ints], chosen: Sequence[int], rows: Ints) -> Floats:
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


def _time(found: Found, layout: Layout, rows: Ints) -> None:
    """Whole plans, by the clock."""
    zeros, parts = np.zeros(len(rows)), range(len(layout.starts))
    seconds = _seconds(layout, [], parts, rows)
    delays = _links(layout, [], parts, rows, seconds)
    values = clock(
        layout.tables.graph, [zeros + s for s in seconds], [zeros + d for d in delays], layout.overlaps, len(rows)
    )
    found.evaluated += len(rows)
    found.accept(values, np.tile(np.array(layout.starts), (len(rows), 1)), rows)
