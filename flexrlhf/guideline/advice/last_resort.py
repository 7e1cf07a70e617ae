"""Last resort where no placement fits: all of a device's memory is filled, and any idle model is in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from time import perf_counter

from flexrlhf.guideline.advice.candidates import Candidate, FeasibleCandidate, check
from flexrlhf.guideline.advice.host_offload import offload_sets, offloaded_spaces
from flexrlhf.guideline.advice.space import Space, is_allowed, on_all_devices, with_schedule, with_syncs_in_turn
from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.problem import MeshShape, SearchProblem
from flexrlhf.strategies.strategy import COLOCATED, DISAGGREGATED

SECONDS = 2.0
"""Seconds that the search of one space may take, where any plan that fits will do."""
GAP = 0.5
"""Share of its time by which such a plan may miss the fastest."""
CHECKED = 3
"""Results of a search that are planned."""


def last_resort(base: Space, until: float = inf) -> Candidate | None:
    """Return a placement with a plan that fits; None where no search finds any.

    ``until``: time of ``perf_counter`` at which the searches end.
    """
    strategy = base.spec.schedule.strategy
    for label, space in last_spaces(base):
        if not _each_fits(space):
            continue
        for name, variant in _variants(space):
            left = until - perf_counter()
            if left <= 0:
                return None
            result = search(_problem(variant), min(SECONDS, left), GAP)
            for item in result.best[:CHECKED]:
                found = Candidate("search", f"{label}, {name}", variant, item.assignment)
                is_one = is_allowed(item.seconds) and strategy in (None, found.strategy)
                if is_one and isinstance(check(found), FeasibleCandidate):
                    return found
    return None


def last_spaces(base: Space) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) of what lag and strategy allow, in which plans may fill all memory."""
    schedule = base.spec.schedule
    if not base.must_have_shadows:
        plain = with_schedule(base, schedule.num_chunks, 0)
        yield "without shadows", replace(plain, usable=1.0)
    if base.may_have_shadows and schedule.strategy in (None, DISAGGREGATED):
        space = with_syncs_in_turn(base) if base.spec.sync.overlap == "auto" else base
        yield "with shadows", replace(space, has_shadows=True, usable=1.0)


def _variants(space: Space) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) with as many models in host memory as may be, then fewer, then none."""
    yield from reversed([*offloaded_spaces(space, offload_sets(space))])
    yield "memory full", space


def _problem(space: Space) -> SearchProblem:
    is_colocated = space.spec.schedule.strategy == COLOCATED
    return on_all_devices(space) if is_colocated else space.problem


def _each_fits(space: Space) -> bool:
    """Whether every model fits some of the devices while it computes, which host memory for others does not change."""
    problem = space.problem
    most = max(problem.pool.memory.values()) * (1 + ROUNDING)
    shapes = sorted(shapes_of(problem), key=lambda shape: -shape.size)
    return all(
        any(each.resting + each.active <= most for shape in shapes for each in part.options(shape))
        for part in problem.parts
    )


def least_needed(space: Space) -> dict[str, float | None]:
    """Return the least bytes that each model needs on a device while it computes, over all meshes and settings; None
    for a model that has no settings on any mesh."""
    problem = space.problem
    needed: dict[str, float | None] = {}
    for part in problem.parts:
        options = (each for shape in shapes_of(problem) for each in part.options(shape))
        needed[part.name] = min((each.resting + each.active for each in options), default=None)
    return needed


def shapes_of(problem: SearchProblem) -> set[MeshShape]:
    """Return the shapes of all meshes."""
    return {problem.shape_of(*mesh) for mesh in problem.all_meshes}
