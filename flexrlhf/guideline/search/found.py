"""What a search has come across so far, and what it hands back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from flexrlhf.guideline.search.pareto import Floats
from flexrlhf.guideline.search.plans import ROUNDING, assignment_of, fits, plan_seconds, plans_over
from flexrlhf.guideline.search.problem import Assignment
from flexrlhf.guideline.search.tables import Ints, Tables

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Starts and options of a plan."""


NEAREST = 16
"""Plans that are timed although they do not fit."""


@dataclass(frozen=True)
class Plan:
    seconds: float
    assignment: Assignment


@dataclass(frozen=True)
class Rejected:
    """A plan that would be faster than the best if devices had ``over`` bytes more."""

    seconds: float
    assignment: Assignment
    over: float
    device: int

    @property
    def reason(self) -> str:
        return f"device {self.device} lacks {self.over / 1e9:.1f} GB"


@dataclass(frozen=True)
class Result:
    """``bound``: no plan of the stated space takes less. ``space``: its plans before anything was left out.

    ``evaluated``: plans whose seconds were computed; ``pruned_*``: sets of plans left out at once, by reason.
    ``best``: the fastest plans that were met, distinct, the first of them the best; only that one is proven.
    ``rejected``: some that are faster but do not fit. ``is_finished``: the search ended before its time was up.
    ``meshes``: which meshes the space has.
    """

    best: tuple[Plan, ...]
    bound: float
    space: int
    evaluated: int
    pruned_by_memory: int
    pruned_by_bound: int
    wall_seconds: float
    is_finished: bool
    rejected: tuple[Rejected, ...] = ()
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
        """By how much of its time a faster plan may at most be faster; 0: none is. Infinite: nothing is known."""
        if not self.best:
            return 0.0 if self.is_finished else math.inf
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        return self.is_feasible and self.gap <= 2 * ROUNDING


@dataclass
class Found:
    """``fastest``: a heap of the best plans, the slowest on top. ``slack``: share of the time that does not matter.

    ``pruned_floor``: the least bound of anything that was left out.
    """

    tables: Tables
    deadline: float
    slack: float
    keep: int
    fastest: list[tuple[float, Key]] = field(default_factory=list)
    known: set[Key] = field(default_factory=set)
    refused: list[tuple[float, Key]] = field(default_factory=list)
    evaluated: int = 0
    pruned_by_memory: int = 0
    pruned_by_bound: int = 0
    pruned_floor: float = math.inf
    best: float = math.inf

    @property
    def goal(self) -> float:
        """Only plans below are of interest."""
        return self.best * (1 - max(self.slack, ROUNDING))

    @property
    def is_late(self) -> bool:
        return perf_counter() > self.deadline

    def below_goal(self, bounds: Floats) -> Ints:
        """Rows worth going on with, the most promising first; the others are counted as pruned."""
        goal = self.goal
        kept = np.flatnonzero(bounds < goal)
        if len(kept) < len(bounds):
            self.pruned_by_bound += len(bounds) - len(kept)
            self.pruned_floor = min(self.pruned_floor, float(bounds[bounds >= goal].min()))
        return kept[np.argsort(bounds[kept], kind="stable")]

    def drop(self, bound: float) -> None:
        self.pruned_by_bound += 1
        self.pruned_floor = min(self.pruned_floor, bound)

    def offer(self, starts: Ints, options: Ints) -> tuple[Floats, Floats]:
        """Time whole plans that may not fit: their seconds (infinite where they do not), and bytes that they lack.

        Of those that do not fit the nearest and the fastest (call by call) are timed, to be told of.
        """
        over = plans_over(self.tables, starts, options)
        good = fits(self.tables, over)
        seconds = np.full(len(over), np.inf)
        self.pruned_by_memory += int((~good).sum())
        if good.any():
            seconds[good] = plan_seconds(self.tables, starts[good], options[good])
            self.accept(seconds, starts, options)
        near = self._first(np.where(good, np.inf, over), NEAREST)
        total = sum(part.seconds[options[:, p]].sum(axis=1) for p, part in enumerate(self.tables.parts))
        near = sorted({*near, *self._first(np.where(good, np.inf, total), NEAREST)})
        if near:
            missed = plan_seconds(self.tables, starts[near], options[near])
            for row in self._first(missed, 2):
                self._keep(self.refused, float(missed[row]), _key(starts[near], options[near], row))
        self.evaluated += int(good.sum()) + len(near)
        return seconds, over

    def accept(self, seconds: Floats, starts: Ints, options: Ints) -> None:
        """Note plans that fit."""
        for row in self._first(seconds, self.keep):
            value = float(seconds[row])
            if value < self.best or len(self.fastest) < self.keep or value < -self.fastest[0][0]:
                self._keep(self.fastest, value, _key(starts, options, row))
                self.best = min(self.best, value)

    def _first(self, seconds: Floats, number: int) -> list[int]:
        """Rows of the lowest."""
        number = min(number, len(seconds))
        rows = np.argpartition(seconds, number - 1)[:number] if number < len(seconds) else np.arange(number)
        return [int(row) for row in rows[np.argsort(seconds[rows], kind="stable")] if np.isfinite(seconds[row])]

    def _keep(self, heap: list[tuple[float, Key]], seconds: float, key: Key) -> None:
        if key in self.known:
            return
        self.known.add(key)
        heapq.heappush(heap, (-seconds, key))
        if len(heap) > self.keep:
            self.known.discard(heapq.heappop(heap)[1])

    def result(self, bound: float, began: float, is_finished: bool) -> Result:
        best = [Plan(-value, assignment_of(self.tables, *key)) for value, key in sorted(self.fastest, reverse=True)]
        refused = sorted(((-value, key) for value, key in self.refused if -value < self.best))
        return Result(
            tuple(best),
            min(bound, self.pruned_floor, self.best),
            self.tables.space,
            self.evaluated,
            self.pruned_by_memory,
            self.pruned_by_bound,
            perf_counter() - began,
            is_finished,
            tuple(self._rejected(value, key) for value, key in refused),
            self.tables.problem.meshes.about,
        )

    def _rejected(self, seconds: float, key: Key) -> Rejected:
        assignment = assignment_of(self.tables, *key)
        over, device = fullest_device(self.tables, assignment)
        return Rejected(seconds, assignment, over, device)


def fullest_device(tables: Tables, assignment: Assignment) -> tuple[float, int]:
    """(bytes over its memory, device) of the device that lacks most."""
    devices = [choice.start for choice in assignment] + [first for first, _ in tables.memory_at]
    over, device = max((_over(tables, assignment, device), -device) for device in devices)
    return over, -device


def _over(tables: Tables, assignment: Assignment, device: int) -> float:
    there = [choice.option for choice in assignment if choice.start <= device < choice.start + choice.size]
    used = sum(option.resting for option in there) + max((option.active for option in there), default=0.0)
    return used - tables.memory_of(device)


def _key(starts: Sequence[Sequence[int]] | Ints, options: Sequence[Sequence[int]] | Ints, row: int) -> Key:
    return tuple(int(value) for value in starts[row]), tuple(int(value) for value in options[row])
