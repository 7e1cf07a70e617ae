"""Branch and bound: first over the meshes of the parts, then over their options."""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from flexrlhf.guideline.search.choose import choose, layout_of
from flexrlhf.guideline.search.climb import beginnings, climb, with_options
from flexrlhf.guideline.search.found import Found, Result
from flexrlhf.guideline.search.layouts import (
    ANY,
    WHOLE,
    Floors,
    Placed,
    areas_of,
    floors_of,
    layout_bound,
    layout_over,
)
from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.places import Places, places_of
from flexrlhf.guideline.search.plans import fits, relations
from flexrlhf.guideline.search.problem import Problem
from flexrlhf.guideline.search.tables import Bools, Ints, PartTable, tables_of

MISSED = 0.002
"""Share of the best time that a bound may lose by taking a part's tasks one by one."""
NEAR = 0.005
ROWS = 1024
"""Layouts that are opened at once."""
KEPT = 10
"""Plans that are handed back."""


def search(problem: Problem, seconds_limit: float = 60.0, gap: float = 0.0, keep: int = KEPT) -> Result:
    """The fastest plan of the stated space.

    ``gap``: share of its time by which it may miss the fastest; 0: it is the fastest. After ``seconds_limit`` the best
    so far is returned, with the bound that is proven by then. The same problem gives the same plan, but for the limit.
    """
    began = perf_counter()
    tables = tables_of(problem)
    found = Found(tables, began + seconds_limit, gap, keep)
    if any(not len(part.options) for part in tables.parts):
        return found.result(np.inf, began, True)
    places = places_of(tables)
    for plan in beginnings(tables, places):
        best = found.best
        climb(found, places, plan)
        if np.isfinite(best) and found.best > (1 - gap) * best:
            break  # from here on branches find what is left sooner
    tree = _Tree(found, places)
    left = tree.run()
    return found.result(left, began, not np.isfinite(left))


@dataclass(frozen=True, order=True)
class _Open:
    """Plans of which the parts up to a level are known. ``bound``: the least of theirs.

    ``rank``: its logarithm in steps of ``NEAR``: among those that are near each other the deepest comes first, since
    many partial plans have the same bound.
    """

    rank: int
    height: int
    number: int
    bound: float
    placed: Placed = field(compare=False)
    bounds: Floats = field(compare=False)


class _Tree:
    """``order``: parts as they are placed, those with most work first. ``whole``: parts that are placed with their
    option at once, since no option is near the least of all its tasks."""

    def __init__(self, found: Found, places: Places) -> None:
        self.found, self.places, self.tables = found, places, found.tables
        self.areas = areas_of(self.tables)
        self.floor_goal = found.goal
        self.floors: Floors | None = self._fixed(np.isfinite(self.areas[WHOLE]))
        self.whole = {part for part, table in enumerate(self.tables.parts) if self._is_whole(table)}
        self.open: list[_Open] = []
        self.number = 0
        self.done: set[tuple[int, ...]] = set()
        self.order: list[int] = []

    def _is_whole(self, table: PartTable) -> bool:
        """Whether what its best option takes more than the least of its tasks is a share of the best time."""
        together = np.full(len(self.tables.shapes), np.inf)
        np.minimum.at(together, table.shape, table.seconds.sum(axis=1))
        stated = np.isfinite(together)
        missed = together[stated] - table.least_seconds[stated].sum(axis=1)
        return bool(missed.max() > MISSED * self.found.best)

    def run(self) -> float:
        """The least bound of what is left when the time is up; infinite when all is done."""
        if self.floors is None:
            return np.inf
        least = self.floors.least_area[WHOLE]
        self.order = sorted(range(len(self.tables.parts)), key=lambda part: (-float(least[part]), part))
        none = np.zeros((1, 0), dtype=np.int64)
        self._push(Placed((), none, none, none), self.floors)
        while self.open:
            if self.found.is_late:
                return min(item.bound for item in self.open)
            left = self._step(heapq.heappop(self.open))
            if np.isfinite(left):
                return min([left, *(item.bound for item in self.open)])
        return np.inf

    def _step(self, item: _Open) -> float:
        kept = self.found.below_goal(item.bounds)
        placed = item.placed.rows(kept)
        if not len(kept):
            return np.inf
        if len(placed.parts) == len(self.order):
            return self._finish(placed, item.bounds[kept])
        floors = self._tightened()
        if floors is not None:
            self._push(self._children(placed, floors), floors)
        return np.inf

    def _tightened(self) -> Floors | None:
        """The floors, for the goal of now."""
        if self.floors is not None and self.found.goal < self.floor_goal:
            self.floor_goal = self.found.goal
            self.floors = self._fixed(self.floors.allowed)
        return self.floors

    def _fixed(self, allowed: Bools) -> Floors | None:
        """Leave out shapes that no plan below the goal has, as long as that leaves out more. None: no plan is left."""
        allowed = allowed.copy()
        while allowed.any(axis=1).all():
            floors = floors_of(self.tables, self.areas, allowed)
            before = int(allowed.sum())
            for part in range(len(self.tables.parts)):
                shapes = np.flatnonzero(allowed[part])[:, None]
                placed = Placed((part,), np.zeros_like(shapes), shapes, np.full_like(shapes, ANY))
                kept = self.found.below_goal(layout_bound(self.tables, floors, placed, is_anywhere=True))
                allowed[part] = False
                allowed[part, shapes[kept, 0]] = True
            if int(allowed.sum()) == before:
                return floors
        return None

    def _children(self, placed: Placed, floors: Floors) -> Placed:
        """Each row with each mesh of the next part that fits and is not the image of another."""
        part = self.order[len(placed.parts)]
        ends = np.concatenate([placed.starts, placed.starts + self.tables.sizes[placed.shapes]], axis=1)
        found = [self.places.around(row) for row in ends.tolist()]
        parents = np.repeat(np.arange(len(placed)), [len(places) for places, _ in found])
        starts = np.concatenate([places for places, _ in found])
        shapes = np.concatenate([shape for _, shape in found])
        kept = floors.allowed[part][shapes]
        parents, starts, shapes = parents[kept], starts[kept], shapes[kept]
        options = np.full_like(starts, ANY)
        if part in self.whole:
            parents, _ = with_options(self.tables, part, parents, shapes)
            starts, options = with_options(self.tables, part, starts, shapes)
            shapes = self.tables.parts[part].shape[options]
        children = Placed(
            (*placed.parts, part),
            np.concatenate([placed.starts[parents], starts[:, None]], axis=1),
            np.concatenate([placed.shapes[parents], shapes[:, None]], axis=1),
            np.concatenate([placed.options[parents], options[:, None]], axis=1),
        )
        children = children.rows(self.places.is_left(children.starts, self.tables.sizes[children.shapes]))
        good = fits(self.tables, layout_over(self.tables, children))
        self.found.pruned_by_memory += int((~good).sum())
        return children.rows(good)

    def _push(self, placed: Placed, floors: Floors) -> None:
        bounds = layout_bound(self.tables, floors, placed)
        fitting = np.isfinite(bounds)
        self.found.pruned_by_memory += int((~fitting).sum())
        placed, bounds = placed.rows(fitting), bounds[fitting]
        kept = self.found.below_goal(bounds)
        for at in range(0, len(kept), ROWS):
            piece = kept[at : at + ROWS]
            self.number += 1
            height = len(self.order) - len(placed.parts)
            least = float(bounds[piece[0]])
            rank = int(math.log(least) / NEAR) if least > 0 else -sys.maxsize
            heapq.heappush(self.open, _Open(rank, height, self.number, least, placed.rows(piece), bounds[piece]))

    def _finish(self, placed: Placed, bounds: Floats) -> float:
        """The options of whole layouts, the most promising first."""
        columns = np.argsort(self.order)
        starts, shapes, options = placed.starts[:, columns], placed.shapes[:, columns], placed.options[:, columns]
        keys = self._keys(starts, shapes, options)
        for row, bound in enumerate(bounds.tolist()):
            if bound >= self.found.goal:
                self.found.drop(bound)
            elif keys[row] not in self.done:
                if self.found.is_late:
                    return float(bound)
                self.done.add(keys[row])
                layout = layout_of(self.tables, starts[row].tolist(), shapes[row].tolist(), options[row].tolist())
                left = choose(self.found, layout)
                if np.isfinite(left):
                    return min(left, float(bound))
        return np.inf

    def _keys(self, starts: Ints, shapes: Ints, options: Ints) -> list[tuple[int, ...]]:
        """Alike for layouts that give the same seconds and fill alike devices alike: which parts lie on one device
        follows from which overlap in pairs, since meshes are runs of devices."""
        sizes = self.tables.sizes[shapes]
        codes: list[Ints] = [shapes, options]
        for i in range(starts.shape[1]):
            for j in range(i + 1, starts.shape[1]):
                codes.append(relations(starts[:, i], sizes[:, i], starts[:, j], sizes[:, j])[:, None])
        if not self.tables.is_uniform:
            codes.append(starts)
        return [tuple(row) for row in np.concatenate(codes, axis=1).tolist()]
