"""Branch and bound: first over the meshes of the parts, then over their options."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from flexrlhf.guideline.search.assignments import ROUNDING, Spot, WholeAssignments, fits, relations
from flexrlhf.guideline.search.bounds import (
    UNDECIDED,
    WHOLE,
    Floors,
    PartialAssignments,
    areas_of,
    floors_of,
    part_bound,
    partial_bound,
    partial_over,
)
from flexrlhf.guideline.search.hill_climb import (
    DistinctMeshes,
    beginnings,
    climb,
    distinct_meshes,
    spots_of,
    with_options,
)
from flexrlhf.guideline.search.option_search import OptionSearch
from flexrlhf.guideline.search.part_table import Bools, Floats, Ints, PartTable
from flexrlhf.guideline.search.problem import Assignment, SearchProblem
from flexrlhf.guideline.search.result import SearchResult, SearchState
from flexrlhf.guideline.search.tables import Tables, tables_of
from flexrlhf.guideline.search.vectors import VectorPacking, with_vector_meshes

MISSED = 0.002
"""Share of the best time that a bound may lose by taking a part's tasks one by one."""
NEAR = 0.005
"""Relative difference of bounds that are near each other."""
BEAM = 64
"""Partial assignments that are followed to their end before the search, those with the least bounds."""
DIVES = 8
"""Assignments of meshes whose options are searched at that end, and of every branch at the end of the work."""
LAST = 0.9
"""Share of the work after which only options are searched, on meshes that are decided."""
MESHES = 0.6
"""Share of the work that the meshes of a problem may take before the vectors."""
ROWS = 64
"""Partial assignments that are expanded at once, each to thousands: more take gigabytes and overrun the limit."""
CLIMBED = 2
"""Assignments to begin from that are climbed from, the fastest ones."""
KEPT = 10
"""Assignments that are returned."""


def search(
    problem: SearchProblem,
    seconds_limit: float = 60.0,
    gap: float = 0.0,
    keep: int = KEPT,
    seeds: Sequence[Assignment] = (),
) -> SearchResult:
    """Find the fastest assignment of the stated space.

    At ``seconds_limit`` the best so far is returned, with the bound that is proven by then. The same problem gives the
    same assignment on every machine.

    seconds_limit:  work of the search, in seconds that it takes on an ordinary core.
    gap:            share of its time by which the result may miss the fastest; 0: it is the fastest.
    keep:           number of assignments to return.
    seeds:          assignments to begin from; those that fit are no faster than the result.
    """
    first = seconds_limit if problem.vectors is None else MESHES * seconds_limit
    found = _search(SearchState(tables_of(problem), first, gap, keep), seeds)
    if problem.vectors is None:
        return found
    seeds = [*seeds, found.assignment] if found.is_feasible else seeds
    tables = tables_of(with_vector_meshes(problem, seeds))
    state = SearchState(tables, seconds_limit - found.work, gap, keep, best=found.seconds)
    return found.joined(_search(state, seeds, VectorPacking(tables, problem.vectors)), keep)


def _search(state: SearchState, seeds: Sequence[Assignment], packing: VectorPacking | None = None) -> SearchResult:
    """Search the meshes of the state's problem, or those that ``packing`` gives."""
    began, tables = perf_counter(), state.tables
    if any(not len(part.options) for part in tables.parts):
        return state.result(np.inf, began, True)
    meshes = distinct_meshes(tables)
    memory = tables.most_memory * (1 + ROUNDING)
    if any((part.resting + part.active).min() > memory for part in tables.parts):
        # a part fits no device, even alone and with its leanest option
        for spots in beginnings(tables, meshes):
            state.offer(_assignments(tables, [spots]))
        return state.result(np.inf, began, True)
    planted = [spots_of(tables, seed) for seed in seeds]
    for spots in _fastest(state, [each for each in planted if each is not None]):
        climb(state, meshes, spots)
    for spots in beginnings(tables, meshes) if packing is None or not np.isfinite(state.best) else ():
        best = state.best
        climb(state, meshes, spots)
        if np.isfinite(best) and state.best > (1 - state.slack) * best:
            break  # from here on branches find what is left sooner
    left = _MeshSearch(state, meshes, packing).run()
    return state.result(left, began, not np.isfinite(left))


def _fastest(state: SearchState, planted: list[list[Spot]]) -> list[list[Spot]]:
    """Store ``planted`` assignments that fit. Returns the fastest, or those nearest to fitting, to climb from."""
    if not planted:
        return []
    seconds, over = state.offer(_assignments(state.tables, planted))
    return [planted[row] for row in np.lexsort((np.maximum(over, 0.0), seconds))[:CLIMBED]]


def _assignments(tables: Tables, spots: Sequence[Sequence[Spot]]) -> WholeAssignments:
    """Return assignments with the ``spots`` of each."""
    starts, options = np.moveaxis(np.array(spots, dtype=np.int64), 2, 0)
    return WholeAssignments(tables, starts, options)


@dataclass(frozen=True, order=True)
class _Branch:
    """Partial assignments that are still to be expanded, in the order of the heap.

    rank:     logarithm of ``bound`` in steps of ``NEAR``: of those near each other the deepest comes first, since many
              partial assignments have the same bound.
    height:   parts that are undecided.
    number:   running number.
    bound:    the least of ``bounds``.
    partial:  the partial assignments.
    bounds:   lower bound on the time of each.
    """

    rank: int
    height: int
    number: int
    bound: float
    partial: PartialAssignments = field(compare=False)
    bounds: Floats = field(compare=False)


class _MeshSearch:
    """Branch and bound over the meshes of the parts.

    ``order``: parts in the order of branching: of ``packing``, or those with most work first. ``whole``: parts whose
    option is decided together with their mesh, since no option is near the least of all its tasks.
    """

    def __init__(self, state: SearchState, meshes: DistinctMeshes, packing: VectorPacking | None) -> None:
        self.state, self.meshes, self.packing, self.tables = state, meshes, packing, state.tables
        self.areas = areas_of(self.tables)
        self.floor_goal = state.goal
        self.floors: Floors | None = self._fixed(np.isfinite(self.areas[WHOLE]))
        self.whole = {part for part, table in enumerate(self.tables.parts) if self._is_whole(table)}
        self.branches: list[_Branch] = []
        self.number = 0
        self.done: set[tuple[int, ...]] = set()
        self.order: list[int] = []

    def _is_whole(self, table: PartTable) -> bool:
        """Whether its best option takes more than the least of its tasks, by a share of the best time."""
        together = np.full(len(self.tables.shapes), np.inf)
        np.minimum.at(together, table.shape, table.seconds.sum(axis=1))
        stated = np.isfinite(together)
        missed = together[stated] - table.least_seconds[stated].sum(axis=1)
        return bool(missed.max() > MISSED * self.state.best)

    def run(self) -> float:
        """Search until nothing is left. Returns the least bound of the rest at the limit, else infinite."""
        if self.floors is None:
            return np.inf
        if self.packing is None:
            least, none = self.floors.least_area[WHOLE], np.zeros((1, 0), dtype=np.int64)
            self.order = sorted(range(len(self.tables.parts)), key=lambda part: (-float(least[part]), part))
            root = PartialAssignments((), none, none, none)
        else:
            self.order, root = self.packing.order, self.packing.roots
        self._push(root, self.floors)
        self._dive(root, self.floors)
        while self.branches:
            if self.state.work > LAST * self.state.seconds_limit:
                return self._end()
            left = self._step(heapq.heappop(self.branches))
            if np.isfinite(left):
                return min([left, *(branch.bound for branch in self.branches)])
        return np.inf

    def _dive(self, partial: PartialAssignments, floors: Floors) -> None:
        """Look for a fast assignment where bounds are least. All that is left out is searched later."""
        left_out, bounds = self.state.pruned_by_memory, np.zeros(1)
        while len(partial.parts) < len(self.order) and len(partial) and not self.state.is_exhausted:
            partial = self._children(partial, floors)
            self.state.count(len(partial))
            bounds = partial_bound(self.tables, floors, partial, self.state.goal)
            kept = np.argsort(bounds, kind="stable")[:BEAM]
            kept = kept[bounds[kept] < self.state.goal]
            partial, bounds = partial.rows(kept), bounds[kept]
        self.state.pruned_by_memory = left_out
        if len(partial.parts) == len(self.order):
            self._finish(partial.rows(slice(DIVES)), bounds[:DIVES])

    def _end(self) -> float:
        """Look for a fast assignment among the meshes that are decided. Returns the least bound of the rest."""
        left = min(branch.bound for branch in self.branches)
        for branch in sorted(branch for branch in self.branches if not branch.height):
            if not self.state.is_exhausted:
                self._finish(branch.partial.rows(slice(DIVES)), branch.bounds[:DIVES])
        return left

    def _step(self, branch: _Branch) -> float:
        """Expand a branch. Returns the least bound of its rest at the limit, else infinite."""
        kept = self.state.below_goal(branch.bounds)
        partial = branch.partial.rows(kept)
        if not len(kept):
            return np.inf
        if len(partial.parts) == len(self.order):
            return self._finish(partial, branch.bounds[kept])
        floors = self._tightened()
        if floors is not None:
            self._push(self._children(partial, floors), floors)
        return np.inf

    def _tightened(self) -> Floors | None:
        """Return the floors for the present goal; None: no assignment is left."""
        if self.floors is not None and self.state.goal < self.floor_goal:
            self.floor_goal = self.state.goal
            self.floors = self._fixed(self.floors.allowed)
        return self.floors

    def _fixed(self, allowed: Bools) -> Floors | None:
        """Drop shapes that no assignment below the goal has, until none is left to drop. None: no assignment is left.

        ``allowed``: (parts, shapes).
        """
        allowed = allowed.copy()
        while allowed.any(axis=1).all():
            floors = floors_of(self.tables, self.areas, allowed)
            before = int(allowed.sum())
            for part in range(len(self.tables.parts)):
                shapes = np.flatnonzero(allowed[part])
                kept = self.state.below_goal(part_bound(self.tables, floors, part, shapes))
                allowed[part] = False
                allowed[part, shapes[kept]] = True
            if int(allowed.sum()) == before:
                return floors
        return None

    def _children(self, partial: PartialAssignments, floors: Floors) -> PartialAssignments:
        """Return each row with each mesh of the next part that fits and is not the image of another."""
        part = self.order[len(partial.parts)]
        parents, starts, shapes = self._spots(partial, part)
        kept = floors.allowed[part][shapes]
        parents, starts, shapes = parents[kept], starts[kept], shapes[kept]
        options = np.full_like(starts, UNDECIDED)
        if part in self.whole:
            parents, _ = with_options(self.tables, part, parents, shapes)
            starts, options = with_options(self.tables, part, starts, shapes)
            shapes = self.tables.parts[part].shape[options]
        self.state.count(0, len(starts))
        children = PartialAssignments(
            (*partial.parts, part),
            np.concatenate([partial.starts[parents], starts[:, None]], axis=1),
            np.concatenate([partial.shapes[parents], shapes[:, None]], axis=1),
            np.concatenate([partial.options[parents], options[:, None]], axis=1),
            None if partial.border is None else partial.border[parents],
        )
        if self.packing is None:
            children = children.rows(self.meshes.is_left(children.starts, self.tables.sizes[children.shapes]))
        fitting = fits(self.tables, partial_over(self.tables, children))
        self.state.pruned_by_memory += int((~fitting).sum())
        return children.rows(fitting)

    def _spots(self, partial: PartialAssignments, part: int) -> tuple[Ints, Ints, Ints]:
        """Return (row, start, shape) of each mesh of the next part, next to the meshes of each row."""
        if self.packing is not None:
            return self.packing.spots(partial, part)
        ends = np.concatenate([partial.starts, partial.starts + self.tables.sizes[partial.shapes]], axis=1)
        meshes = [self.meshes.around(row) for row in ends.tolist()]
        parents = np.repeat(np.arange(len(partial)), [len(starts) for starts, _ in meshes])
        starts = np.concatenate([starts for starts, _ in meshes])
        return parents, starts, np.concatenate([shapes for _, shapes in meshes])

    def _push(self, partial: PartialAssignments, floors: Floors) -> None:
        """Store rows below the goal as branches of at most ``ROWS``."""
        self.state.count(len(partial))
        bounds = partial_bound(self.tables, floors, partial, self.state.goal)
        fitting = np.isfinite(bounds)
        self.state.pruned_by_memory += int((~fitting).sum())
        partial, bounds = partial.rows(fitting), bounds[fitting]
        kept = self.state.below_goal(bounds)
        height = len(self.order) - len(partial.parts)
        for at in range(0, len(kept), ROWS):
            piece = kept[at : at + ROWS]
            self.number += 1
            least = float(bounds[piece[0]])
            rank = int(math.log(least) / NEAR) if least > 0 else -sys.maxsize
            branch = _Branch(rank, height, self.number, least, partial.rows(piece), bounds[piece])
            heapq.heappush(self.branches, branch)

    def _finish(self, partial: PartialAssignments, bounds: Floats) -> float:
        """Search the options of rows with all meshes decided, the most promising first.

        Returns the least bound of the rest at the limit, else infinite.
        """
        columns = np.argsort(self.order)
        starts, shapes, options = partial.starts[:, columns], partial.shapes[:, columns], partial.options[:, columns]
        keys = self._keys(starts, shapes, options)
        for row, bound in enumerate(bounds.tolist()):
            if bound >= self.state.goal:
                self.state.drop(bound)
            elif keys[row] not in self.done:
                if self.state.is_exhausted:
                    return float(bound)
                self.done.add(keys[row])
                left = OptionSearch(self.state, starts[row].tolist(), shapes[row].tolist()).run(options[row].tolist())
                if np.isfinite(left):
                    return min(left, float(bound))
        return np.inf

    def _keys(self, starts: Ints, shapes: Ints, options: Ints) -> list[tuple[int, ...]]:
        """Return the key of each row, equal for rows with the same seconds that fill alike devices alike.

        Which parts share one device follows from which overlap in pairs, since meshes are runs of devices.
        """
        sizes = self.tables.sizes[shapes]
        codes: list[Ints] = [shapes, options]
        for i in range(starts.shape[1]):
            for j in range(i + 1, starts.shape[1]):
                codes.append(relations(starts[:, i], sizes[:, i], starts[:, j], sizes[:, j])[:, None])
        if not self.tables.is_uniform:
            codes.append(starts)
        return [tuple(row) for row in np.concatenate(codes, axis=1).tolist()]
