"""Last resort if no placement fits, with all memory filled and idle models in host memory; else the refusal, with the
reason and the changes that would help. Each change is planned before it is suggested."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice

from flexrlhf.api import Spec, Strategy, UserError, bytes_text, either, read_yaml
from flexrlhf.guideline.advice.candidates import (
    Candidate,
    FeasibleCandidate,
    RejectedCandidate,
    check,
    offloaded_spaces,
)
from flexrlhf.guideline.advice.request_changes import (
    RequestChange,
    fixed_settings,
    opening_changes,
    paired_changes,
    request_changes,
)
from flexrlhf.guideline.advice.searched_step import is_allowed
from flexrlhf.guideline.advice.space import Space, make_space, on_all_devices, with_schedule, with_syncs_in_turn
from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.problem import UNLIMITED, MeshShape, SearchProblem

TRIES = 15
"""Changes, searches and plans of one series of changes, so that no series takes those of the next: all of a refusal are
work of at most about a minute, the same on every machine."""
PLANNED_DEVICES = 1000
"""Devices whose plan counts as one try more."""
SPACE_SECONDS = 2.0
"""Seconds that the search of one space may take, where any plan that fits will do."""
GAP = 0.5
"""Share of its time by which such a plan may miss the fastest."""
CHECKED = 3
"""Results of a search that are planned."""


def last_resort(base: Space, tries: Iterator[int] | None = None) -> FeasibleCandidate | None:
    """Return a placement with a plan that fits; None if no search finds any.

    ``tries``: an item for each search, and one or several for each plan; None: without end.
    """
    strategy, tries = base.spec.schedule.strategy, count() if tries is None else tries
    cost = 1 + len(base.cluster.devices) // PLANNED_DEVICES
    for label, space in last_spaces(base):
        if not _each_fits(space):
            continue
        # as many models in host memory as may be, then fewer, then none
        for name, variant in (*reversed([*offloaded_spaces(space)]), ("memory full", space)):
            if next(tries, None) is None:
                return None
            is_colocated = space.spec.schedule.strategy == Strategy.COLOCATED
            problem = on_all_devices(variant) if is_colocated else variant.problem
            result = search(problem, SPACE_SECONDS, GAP)
            for item in result.best[:CHECKED]:
                found = Candidate("search", f"{label}, {name}", variant, item.assignment)
                is_one = is_allowed(item.seconds) and strategy in (None, found.strategy)
                if is_one and [*islice(tries, cost)] and isinstance(checked := check(found), FeasibleCandidate):
                    return checked
    return None


def last_spaces(base: Space) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) as lag and strategy allow, in which plans may fill all memory."""
    schedule = base.spec.schedule
    if not base.must_have_shadows:
        plain = with_schedule(base, schedule.num_chunks, 0)
        yield "without shadows", replace(plain.leaner or plain, usable=1.0)
    if base.may_have_shadows and schedule.strategy in (None, Strategy.DISAGGREGATED):
        space = with_syncs_in_turn(base) if base.spec.sync.overlap == "auto" else base
        yield "with shadows", replace(space.leaner or space, has_shadows=True, usable=1.0)


def nothing_fits(base: Space) -> bool:
    """Whether no placement has a plan, because some model fits no device while it computes."""
    spaces = [space for _, space in last_spaces(base)]
    return bool(spaces) and not any(map(_each_fits, spaces))


def _each_fits(space: Space) -> bool:
    """Whether every model fits some of the devices while it computes, which host memory for others does not change."""
    problem = space.problem
    most = max(problem.pool.memory.values()) * (1 + ROUNDING)
    shapes = sorted(_shapes(problem), key=lambda shape: -shape.size)
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
        options = (each for shape in _shapes(problem) for each in part.options(shape))
        needed[part.name] = min((each.resting + each.active for each in options), default=None)
    return needed


def _shapes(problem: SearchProblem) -> set[MeshShape]:
    return {problem.shape_of(*mesh) for mesh in problem.all_meshes}


def refusal_text(base: Space, rejected: Sequence[RejectedCandidate]) -> str:
    """Return one sentence: that nothing fits, why, and the changes that would help (``plan/changes.py``)."""
    nothing = f"no placement of these models fits {_devices(base)}"
    spec, request = base.spec, (base.spec, base.roles.all, base.roles.trained, base.cluster)
    opened = _first_that_fits(base, opening_changes(spec, base.roles.all))
    if opened is not None:
        fixed = fixed_settings(spec, base.roles.all)
        named = [f"{setting}: {fixed[setting]}" for setting in opened.changes]
        return f"{nothing} with {' and '.join(named)}; it would fit {opened.text}"
    needed = [least_needed(space) for _, space in last_spaces(base)]
    single = [_first_that_fits(base, series) for series in request_changes(*request)]
    helps = [each.text for each in single if each is not None]
    if not helps and (pair := _first_that_fits(base, paired_changes(*request))) is not None:
        helps = [pair.text]
    hint = f"it would fit {either(helps)}" if helps else "no change that was tried would help"
    return f"{nothing} ({_cause(base, needed, rejected)}); {hint}"


def lag_text(base: Space, lag: int) -> str:
    """Return one sentence: that nothing fits without a lag, and the option that allows one."""
    return (
        f"no placement of these models fits {_devices(base)} without a lag; with lag {lag}, on batches that many steps "
        f"old, one does: --max-lag {lag} allows it"
    )


def _devices(base: Space) -> str:
    """Return the devices of each class as ``4 H100-80G and 4 A100-40G``."""
    return " and ".join(f"{len(base.cluster.ranks_on(name))} {name}" for name in base.cluster.classes)


def _first_that_fits(base: Space, series: Iterable[RequestChange]) -> RequestChange | None:
    """Return the first change under which a plan fits. ``series``: the smaller changes first."""
    tries = iter(range(TRIES))
    tried = zip(series, tries, strict=False)
    return next((change for change, _ in tried if _fits(base, change.changes, tries)), None)


def _fits(base: Space, changes: Mapping[str, object], tries: Iterator[int]) -> bool:
    spec = base.spec.with_settings(changes)
    try:
        Spec.parse(read_yaml(spec.dump(short=True)))
        return last_resort(make_space(spec, base.costs, base.lengths, base.pending), tries) is not None
    except UserError:
        return False


def _cause(base: Space, needed: Sequence[Mapping[str, float | None]], rejected: Sequence[RejectedCandidate]) -> str:
    """Return which model has no settings, or needs more than any device has with its leanest ones, or why there is
    nothing to place."""
    lacking = [[name for name, size in each.items() if size is None] for each in needed]
    if lacking and all(lacking):
        name = lacking[0][0]
        why = base.enumerator.refusals.get(name, "heads, type, engine or a setting in the YAML")
        return f"{name} has no settings there: {why}"
    found: dict[str, float] = {}
    for each in needed:
        for name, size in each.items():
            found[name] = min(size or UNLIMITED, found.get(name, UNLIMITED))
    # of the largest class
    memory = max(map(base.memory_of, base.pool.memory))
    largest = max(found, key=lambda name: found[name], default="")
    has = f"of {bytes_text(int(memory))}"
    if largest and found[largest] > memory:
        return f"{largest} alone needs {bytes_text(int(found[largest]))} on a device {has}"
    if found:
        return f"the models need more than a device {has}"
    reasons = "; ".join(dict.fromkeys(item.reason for item in rejected if item.reason))
    return reasons or "lag, rare syncs or the strategy need shadow models, which there are none of here"
