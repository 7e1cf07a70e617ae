"""Opponents of a recommendation: random changes of its YAML, and a climb from it, planned and simulated."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from time import process_time

from benchmarks.opponents.moves import Change, Moves, Raw, broad, changed_paths, with_values
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

SAMPLES = 50
"""Random changes that fit."""
LEAST_GAIN = 1e-3
"""Share of the seconds below which two are equal."""


@dataclass
class PlannedSeconds:
    """Seconds of YAMLs, each planned and simulated once.

    costs:    cost model of calls and transfers.
    lengths:  tokens of prompts and responses.
    lag:      the largest lag that is allowed.
    """

    costs: CostModel
    lengths: TextLengths
    lag: int
    _known: dict[str, float | str] = field(default_factory=dict)

    def of(self, raw: Raw) -> float | str:
        """Return the seconds of a step; the reason for a YAML that is refused."""
        key = json.dumps(raw, sort_keys=True, default=str)
        if key not in self._known:
            self._known[key] = self._planned(raw)
        return self._known[key]

    def _planned(self, raw: Raw) -> float | str:
        try:
            plan = make_plan(Spec.parse(deepcopy(raw), "opponent"))
        except UserError as error:
            return str(error)
        if plan.schedule.lag > self.lag:
            return f"has a lag of {plan.schedule.lag}"
        return simulate(plan, self.costs, self.lengths).seconds if fits(plan) else "needs more memory"


def fits(plan: Plan) -> bool:
    """Whether every rank of a plan has enough memory."""
    rank = plan.tightest_rank
    size = plan.device_bytes(rank)
    return size is None or plan.memories[rank].peak_bytes <= size


@dataclass
class Fastest:
    """The fastest YAML so far.

    seconds:  of a step.
    raw:      the YAML.
    fitting:  number of YAMLs that fit.
    tried:    number of all.
    is_top:   whether all single changes were tried and none is faster.
    """

    seconds: float
    raw: Raw
    fitting: int = 0
    tried: int = 0
    is_top: bool = False

    def add(self, seconds: float | str, raw: Raw) -> bool:
        """Count a YAML. Returns whether it is the fastest now."""
        self.tried += 1
        if isinstance(seconds, str):
            return False
        self.fitting += 1
        is_faster = seconds < (1 - LEAST_GAIN) * self.seconds
        if is_faster:
            self.seconds, self.raw = seconds, raw
        return is_faster


def sampled(planned: PlannedSeconds, start: Raw, seconds: float, moves: Moves, limit: float) -> Fastest:
    """Return the fastest of random changes of ``start``. ``limit``: CPU seconds."""
    found, end = Fastest(seconds, start), process_time() + limit
    while found.fitting < SAMPLES and process_time() < end:
        raw = moves.random_change(start)
        found.add(planned.of(raw), raw)
    return found


def climbed(planned: PlannedSeconds, start: Raw, seconds: float, moves: Moves, limit: float) -> Fastest:
    """Return the end of a climb by single changes, of which the first that is faster is taken. ``limit``: CPU
    seconds."""
    found, end = Fastest(seconds, start), process_time() + limit
    while not found.is_top and process_time() < end:
        found.is_top = True
        for change in moves.singles(found.raw):
            raw = with_values(found.raw, change)
            if found.add(planned.of(raw), raw) or process_time() > end:
                found.is_top = False
                break
    return found


def needed_changes(planned: PlannedSeconds, start: Raw, found: Fastest) -> Change:
    """Return the changes of ``start`` that make ``found`` fast, without others."""
    raw = found.raw
    for path in changed_paths(start, raw):
        other = with_values(raw, {path: changed_paths(raw, start).get(path)})
        seconds = planned.of(other)
        if not isinstance(seconds, str) and seconds <= found.seconds * (1 + LEAST_GAIN):
            raw = other
    return changed_paths(start, raw)


def lean(
    planned: PlannedSeconds, start: Raw, moves: Moves, rollout: str | None, is_open: bool, limit: float
) -> Fastest:
    """Sample lean settings until a plan fits. ``rollout``, ``is_open``: as of ``broad``. ``limit``: CPU seconds."""
    found, end = Fastest(float("inf"), start), process_time() + limit
    while not found.fitting and process_time() < end:
        raw = broad(moves, start, rollout, is_open)
        found.add(planned.of(raw), raw)
    return found
