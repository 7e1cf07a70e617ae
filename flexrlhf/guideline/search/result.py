"""Results of a search: the best assignments, the proven bound, and how the space was covered."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.problem import Assignment


@dataclass(frozen=True)
class TimedAssignment:
    """An assignment that fits, and the seconds of a settled step under it."""

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
