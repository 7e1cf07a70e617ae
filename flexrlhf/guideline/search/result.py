"""Result of a search, and its state until then: the best assignments, the proven bound, and how the space was covered.

A limit is on the work of a search, not on its time: it finds the same on every machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from flexrlhf.guideline.search.assignments import ROUNDING, AssignmentKey, WholeAssignments, assignment_of, fits
from flexrlhf.guideline.search.changes import PartChanges
from flexrlhf.guideline.search.part_table import Floats, Ints
from flexrlhf.guideline.search.problem import Assignment, device_bytes
from flexrlhf.guideline.search.tables import Tables

NEAREST = 16
"""Assignments that are timed although they do not fit."""
EVALUATION_SECONDS = 1.2e-3
"""Seconds of evaluating some rows at once on an ordinary core, whatever their number."""
CALL_SECONDS = 0.2e-6
"""Seconds of each call of each of the rows in addition."""
MEMORY_SECONDS = 0.05e-6
"""Seconds of each part of each row whose memory is looked at, whether or not it is evaluated then."""


@dataclass(frozen=True)
class TimedAssignment:
    """An assignment that fits, and the time of a settled step under it."""

    seconds: float
    assignment: Assignment


@dataclass(frozen=True)
class RejectedAssignment:
    """An assignment that would be faster than the best if ``device`` had ``over`` bytes more."""

    seconds: float
    assignment: Assignment
    over: float
    device: int

    @property
    def reason(self) -> str:
        return f"device {self.device} lacks {self.over / 1e9:.1f} GB"


@dataclass(frozen=True)
class SearchResult:
    """Outcome of a search.

    best:              the fastest assignments that were met, distinct, best first; only the first is proven.
    bound:             no assignment of the stated space takes fewer seconds.
    space:             assignments of the space, before anything was left out.
    evaluated:         assignments whose seconds were computed.
    pruned_by_memory:  sets of assignments that were left out at once because they do not fit.
    pruned_by_bound:   sets of assignments that were left out at once because their bound is too high.
    wall_seconds:      seconds that the search took.
    work:              its work, in seconds that it takes on an ordinary core.
    is_finished:       whether it ended before its work reached the limit.
    rejected:          some assignments that are faster but do not fit.
    meshes:            description of the meshes of the space.
    """

    best: tuple[TimedAssignment, ...]
    bound: float
    space: int
    evaluated: int
    pruned_by_memory: int
    pruned_by_bound: int
    wall_seconds: float
    work: float
    is_finished: bool
    rejected: tuple[RejectedAssignment, ...] = ()
    meshes: str = ""

    @property
    def is_feasible(self) -> bool:
        return bool(self.best)

    @property
    def seconds(self) -> float:
        return self.best[0].seconds if self.best else math.inf

    @property
    def assignment(self) -> Assignment:
        return self.best[0].assignment if self.best else ()

    @property
    def gap(self) -> float:
        """Share of its time by which a faster assignment may at most be faster; infinite: no bound is known."""
        if not self.best:
            return 0.0 if self.is_finished else math.inf
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        return self.is_feasible and self.gap <= 2 * ROUNDING

    def joined(self, other: SearchResult, keep: int) -> SearchResult:
        """Return the result of both searches, of which the other one began from the result of this one.

        keep:  number of assignments.
        """
        news = (each for each in other.best if each not in self.best)
        best = sorted((*self.best, *news), key=lambda timed: timed.seconds)[:keep]
        least = best[0].seconds if best else math.inf
        rejected = (each for each in (*self.rejected, *other.rejected) if each.seconds < least)
        return SearchResult(
            best=tuple(best),
            bound=min(self.bound, other.bound),
            space=self.space + other.space,
            evaluated=self.evaluated + other.evaluated,
            pruned_by_memory=self.pruned_by_memory + other.pruned_by_memory,
            pruned_by_bound=self.pruned_by_bound + other.pruned_by_bound,
            wall_seconds=self.wall_seconds + other.wall_seconds,
            work=self.work + other.work,
            is_finished=self.is_finished and other.is_finished,
            rejected=tuple(sorted(rejected, key=lambda each: each.seconds)),
            meshes=f"{self.meshes}; {other.meshes}",
        )


@dataclass
class SearchState:
    """Mutable state of a search.

    tables:            the problem.
    seconds_limit:     work after which it stops.
    slack:             share of the best time that does not matter.
    keep:              number of assignments to return.
    fastest:           heap of the best assignments, the slowest on top.
    stored:            keys of the assignments in the heaps.
    misfits:           heap of the fastest assignments that do not fit.
    evaluated:         assignments whose seconds were computed.
    pruned_by_memory:  sets of assignments that were left out because they do not fit.
    pruned_by_bound:   sets of assignments that were left out because of their bound.
    pruned_floor:      the least bound of anything that was left out.
    best:              least seconds so far.
    work:              work so far, in seconds that it takes on an ordinary core.
    """

    tables: Tables
    seconds_limit: float
    slack: float
    keep: int
    fastest: list[tuple[float, AssignmentKey]] = field(default_factory=list)
    stored: set[AssignmentKey] = field(default_factory=set)
    misfits: list[tuple[float, AssignmentKey]] = field(default_factory=list)
    evaluated: int = 0
    pruned_by_memory: int = 0
    pruned_by_bound: int = 0
    pruned_floor: float = math.inf
    best: float = math.inf
    work: float = 0.0

    @property
    def goal(self) -> float:
        """Seconds below which an assignment is of interest."""
        return self.best * (1 - max(self.slack, ROUNDING))

    @property
    def is_exhausted(self) -> bool:
        """Whether its work is done, whether or not something is left to search."""
        return self.work > self.seconds_limit

    def count(self, rows: int, looked_at: int = 0) -> None:
        """Count the work of evaluating ``rows`` assignments, whole or partial, at once.

        ``looked_at``: assignments whose memory was computed to find them.
        """
        graph = self.tables.graph
        self.work += EVALUATION_SECONDS + CALL_SECONDS * rows * graph.num_calls
        self.work += MEMORY_SECONDS * looked_at * graph.num_parts

    def below_goal(self, bounds: Floats) -> Ints:
        """Rows worth continuing with, the most promising first; the others are counted as pruned."""
        goal = self.goal
        kept = np.flatnonzero(bounds < goal)
        if len(kept) < len(bounds):
            self.pruned_by_bound += len(bounds) - len(kept)
            self.pruned_floor = min(self.pruned_floor, float(bounds[bounds >= goal].min()))
        return kept[np.argsort(bounds[kept], kind="stable")]

    def drop(self, bound: float) -> None:
        """Count a set of assignments as pruned by its ``bound``."""
        self.pruned_by_bound += 1
        self.pruned_floor = min(self.pruned_floor, bound)

    def offer(self, offered: WholeAssignments | PartChanges) -> tuple[Floats, Floats]:
        """Time whole assignments and store the best: their seconds, infinite where they do not fit, and bytes lacking.

        Of those that do not fit the nearest and the fastest (call by call) are timed, to be reported.
        """
        over = offered.over()
        fitting = fits(self.tables, over)
        self.count(int(fitting.sum()), len(offered))
        self.pruned_by_memory += int((~fitting).sum())
        whole, near = np.flatnonzero(fitting), np.zeros(0, dtype=np.int64)
        if len(whole) < len(over):
            nearest = self._lowest(np.where(fitting, np.inf, over), NEAREST)
            nearest += self._lowest(np.where(fitting, np.inf, offered.totals()), NEAREST)
            near = np.array(sorted(set(nearest)), dtype=np.int64)
        # all at once: few rows take as long as many
        timed = np.concatenate([whole, near])
        taken = offered.seconds(timed) if len(timed) else np.zeros(0)
        seconds, missed = np.full(len(over), np.inf), taken[len(whole) :]
        if len(whole):
            seconds[whole] = taken[: len(whole)]
            self.accept(seconds, offered.key)
        for row in self._lowest(missed, 2):
            self._keep(self.misfits, float(missed[row]), offered.key(int(near[row])))
        self.evaluated += len(timed)
        return seconds, over

    def accept(self, seconds: Floats, key: Callable[[int], AssignmentKey]) -> None:
        """Store the best of some assignments that fit. ``key``: of a row."""
        for row in self._lowest(seconds, self.keep):
            value = float(seconds[row])
            if value < self.best or len(self.fastest) < self.keep or value < -self.fastest[0][0]:
                self._keep(self.fastest, value, key(row))
                self.best = min(self.best, value)

    def _lowest(self, values: Floats, number: int) -> list[int]:
        """Rows of the ``number`` lowest finite values, ascending."""
        number = min(number, len(values))
        rows = np.argpartition(values, number - 1)[:number] if number < len(values) else np.arange(number)
        return [int(row) for row in rows[np.argsort(values[rows], kind="stable")] if np.isfinite(values[row])]

    def _keep(self, heap: list[tuple[float, AssignmentKey]], seconds: float, key: AssignmentKey) -> None:
        if key in self.stored:
            return
        self.stored.add(key)
        heapq.heappush(heap, (-seconds, key))
        if len(heap) > self.keep:
            self.stored.discard(heapq.heappop(heap)[1])

    def result(self, bound: float, began: float, is_finished: bool) -> SearchResult:
        """Return the result. ``bound``: of the sets that were not searched. ``began``: by ``perf_counter``."""
        best = [
            TimedAssignment(-value, assignment_of(self.tables, *key))
            for value, key in sorted(self.fastest, reverse=True)
        ]
        misfits = sorted(((-value, key) for value, key in self.misfits if -value < self.best))
        return SearchResult(
            best=tuple(best),
            bound=min(bound, self.pruned_floor, self.best),
            space=self.tables.space,
            evaluated=self.evaluated,
            pruned_by_memory=self.pruned_by_memory,
            pruned_by_bound=self.pruned_by_bound,
            wall_seconds=perf_counter() - began,
            work=self.work,
            is_finished=is_finished,
            rejected=tuple(self._rejected(value, key) for value, key in misfits),
            meshes=self.tables.problem.meshes.about,
        )

    def _rejected(self, seconds: float, key: AssignmentKey) -> RejectedAssignment:
        assignment = assignment_of(self.tables, *key)
        devices = {choice.start for choice in assignment} | {first for first, _ in self.tables.memory_at}
        over, device = max((device_bytes(assignment, at) - self.tables.memory_of(at), -at) for at in devices)
        return RejectedAssignment(seconds, assignment, over, -device)
