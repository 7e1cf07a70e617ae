"""Comparison of placements: by the published rules, an exact search, and the usual ones of published systems.

Every candidate is a Spec that is planned and simulated like any other; what does not fit is listed with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Literal

from flexrlhf.config.spec import ModelSpec, Spec
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.guideline_rules import GuidelineResult, GuidelineRule, guideline
from flexrlhf.guideline.advice.model_options import SearchModel
from flexrlhf.guideline.advice.proposals import (
    TOO_LARGE,
    Allowed,
    Vector,
    choose_settings,
    device_bytes,
    fastest_chunking,
    seconds_of,
    spec_of,
    vector_ranks,
    with_fastest_settings,
)
from flexrlhf.guideline.advice.request import PPO_ROLES
from flexrlhf.guideline.advice.space import USABLE, Space, is_allowed, make_space, with_schedule
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.problem import Assignment
from flexrlhf.guideline.search.result import SearchResult
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.pricing import TextLengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.plan.hub_names import with_names
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies import colocated, disaggregated, interleaving
from flexrlhf.text import bytes_text

Method = Literal["guideline", "search", "usual"]
CHUNKED = 3
"""Results of a search that are also tried in chunks."""
GAP = 0.01
"""Share of its time by which the result of a search may miss the fastest plan."""


@dataclass(frozen=True)
class Candidate:
    """A placement to compare.

    method:      where it comes from.
    name:        unique among those of its method.
    space:       the space that it is a placement of.
    assignment:  its meshes and settings; None where nothing is possible.
    reason:      why nothing is possible.
    """

    method: Method
    name: str
    space: Space
    assignment: Assignment | None
    reason: str = ""

    @cached_property
    def spec(self) -> Spec:
        assert self.assignment is not None, "a candidate without settings is rejected"
        return spec_of(self.space, self.assignment)

    @property
    def strategy(self) -> str:
        if self.space.has_shadows:
            return disaggregated.NAME
        sizes = {choice.size for choice in self.assignment or ()}
        return colocated.NAME if sizes == {self.space.pool.num_devices} else interleaving.NAME


@dataclass(frozen=True)
class PlannedCandidate:
    """Plan and simulation of a candidate, as ``run`` and ``simulate`` make them."""

    plan: Plan
    simulation: Simulation


@dataclass(frozen=True)
class FeasibleCandidate:
    """A candidate that fits.

    candidate:  the candidate.
    seconds:    of a step.
    peak:       bytes on the fullest device.
    share:      share of that device's memory.
    checked:    its plan and simulation, where they have been made.
    """

    candidate: Candidate
    seconds: float
    peak: float
    share: float
    checked: PlannedCandidate | None = None

    @cached_property
    def planned(self) -> PlannedCandidate:
        """Plan and simulation, made on first use where they are not ``checked``."""
        return self.checked or make_planned(self.candidate)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def simulation(self) -> Simulation:
        return self.planned.simulation

    @property
    def samples_per_second(self) -> float:
        return self.candidate.space.batch.num_rows / self.seconds

    @property
    def lag(self) -> int:
        return self.candidate.space.spec.schedule.lag


@dataclass(frozen=True)
class RejectedCandidate:
    """A candidate that is impossible, or does not fit."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class SpaceSearch:
    """Result of the search of one space. ``label``: name of the space."""

    label: str
    result: SearchResult


@dataclass(frozen=True)
class Advice:
    """Outcome of ``advise``.

    feasible:  candidates that fit, fastest first.
    rejected:  the other candidates.
    rules:     rules of the guideline that fired.
    searches:  the spaces that were searched.
    seconds:   what all of it took.
    """

    feasible: tuple[FeasibleCandidate, ...]
    rejected: tuple[RejectedCandidate, ...]
    rules: tuple[GuidelineRule, ...]
    searches: tuple[SpaceSearch, ...]
    seconds: float

    @property
    def best(self) -> FeasibleCandidate:
        """The candidate to use: the fastest of those with the least lag. Raises UserError when nothing fits."""
        lag = min((item.lag for item in self.feasible), default=0)
        best = next((item for item in self.feasible if item.lag == lag), None)
        if best is None:
            reasons = "; ".join(dict.fromkeys(f"{item.candidate.name}: {item.reason}" for item in self.rejected[:3]))
            raise UserError(f"no placement of these models fits the devices ({reasons}); use more or larger devices")
        return best


def advise(
    spec: Spec, costs: CostModel | None = None, lengths: TextLengths | None = None, seconds_limit: float = 60.0
) -> Advice:
    """Compare placements of ``spec``; ``best.plan`` of the result is the recommended one.

    spec:           its placement is ignored; settings of models that it leaves open are chosen.
    costs:          cost model of calls and transfers; None: figures of the device classes, else this machine's
                    profile.
    lengths:        tokens of prompts and responses; None: the longest.
    seconds_limit:  seconds that all searches together may take.

    Raises UserError where nothing fits, or the costs of a device are not known.
    """
    began, costs = perf_counter(), costs or costs_for(spec, None).costs
    base = make_space(spec.model_copy(update={"placement": None}), costs, lengths)
    plain, spaces = with_schedule(base, base.spec.schedule.num_chunks, 0), list(_spaces(base))
    shadowed = [space for _, space in spaces if space.has_shadows]
    by_rules = guideline(plain, shadowed[0] if shadowed else None)
    # most searches end long before; the first ones may need most of the time
    searches = tuple(
        SpaceSearch(label, search(space.problem(), _search_seconds(began, seconds_limit), GAP))
        for label, space in spaces
    )
    searched = [_by_search(space, label, item.result) for (label, space), item in zip(spaces, searches, strict=True)]
    # a lag that the YAML sets leaves nothing without shadows
    others = [] if base.spec.schedule.lag else [_by_guideline(by_rules), *usual(plain)]
    feasible, rejected = _ranked([_with_strategy(candidate, base) for candidate in (*searched, *others)])
    return Advice(feasible, rejected, by_rules.rules, searches, perf_counter() - began)


def _search_seconds(began: float, seconds_limit: float) -> float:
    """Seconds that the next search may take: half of what is left."""
    return max(1.0, (seconds_limit - (perf_counter() - began)) / 2)


def _spaces(base: Space) -> Iterator[tuple[str, Space]]:
    """(label, space) of what is searched: with the lag that the YAML sets, else without and with one."""
    schedule, is_set = base.spec.schedule, "lag" in base.fixed_schedule
    if not (is_set and schedule.lag):
        yield "without shadows", with_schedule(base, schedule.num_chunks, 0)
    is_hybrid = base.spec.rollout.engine == "torch"
    if base.graph.can_shadow and base.pool.num_devices > 1 and not is_hybrid:
        shadowed = replace(base, has_shadows=True)
        for lag, label in ((0, "with shadows"), (1, "with shadows, lag 1")):
            if not is_set or lag == schedule.lag:
                yield label, with_schedule(shadowed, schedule.num_chunks, lag)


def _by_search(space: Space, label: str, result: SearchResult) -> Candidate:
    if not result.is_feasible or not is_allowed(result.seconds):
        reason = TOO_LARGE if result.pruned_by_memory else "no placement of this kind is possible"
        return Candidate("search", label, space, None, reason)
    best = [
        with_fastest_settings(space, result.best[0].assignment),
        *(item.assignment for item in result.best[1:CHUNKED]),
    ]
    _, chunked, assignment = fastest_chunking(space, best)
    return Candidate("search", label, chunked, assignment)


def _with_strategy(candidate: Candidate, base: Space) -> Candidate:
    """Drop the assignment of a candidate that has another strategy than the YAML sets."""
    strategy = base.spec.schedule.strategy
    if strategy in (None, candidate.strategy) or candidate.assignment is None:
        return candidate
    return replace(candidate, assignment=None, reason=f"is {candidate.strategy}; schedule.strategy is {strategy}")


def _by_guideline(result: GuidelineResult) -> Candidate:
    return Candidate("guideline", result.strategy, result.space, result.assignment, TOO_LARGE)


def usual(space: Space) -> Iterator[Candidate]:
    """Placements of published systems, in the engines of this spec: those of DeepSpeed-Chat and OpenRLHF, HybridFlow's
    split and the symmetric heuristic of ReaL's comparison."""
    roles, one = space.roles.all, Fraction(1)
    everywhere = (one,) * len(roles)
    yield _usual(space, "co-located ZeRO-3", everywhere, _is_zero3)
    yield _usual(space, "standalone", (one / len(roles),) * len(roles))
    if is_ppo(space):
        yield _usual(space, "split", (one / 2,) * len(roles))
    widest = min(8, space.pool.per_node)
    yield _usual(space, f"symmetric, tp {widest}", everywhere, lambda model, settings: settings.tp == widest)


def _is_zero3(model: SearchModel, settings: ModelSpec) -> bool:
    """Whether a model is sharded by ZeRO-3 alone; a rollout engine never is."""
    return model.is_rollout or (settings.zero == 3 and settings.tp == 1)


def _usual(space: Space, name: str, vector: Vector, allowed: Allowed | None = None) -> Candidate:
    ranks = vector_ranks(space, vector)
    if ranks is None:
        return Candidate("usual", name, space, None, "these shares are no whole devices, or of several classes")
    assignment = choose_settings(space, ranks, allowed)
    if isinstance(assignment, str):
        return Candidate("usual", name, space, None, assignment)
    return Candidate("usual", name, space, assignment)


def is_ppo(space: Space) -> bool:
    """Whether the algorithm has PPO's four models."""
    return set(space.roles.all) == set(PPO_ROLES)


def _ranked(
    candidates: Sequence[Candidate],
) -> tuple[tuple[FeasibleCandidate, ...], tuple[RejectedCandidate, ...]]:
    """Candidates that fit, fastest first, and the others.

    What is reported in full is planned and simulated: the candidate to use, and that of the guideline.
    """
    results = [check(item) if item.method == "guideline" else estimate(item) for item in candidates]
    feasible = sorted((item for item in results if isinstance(item, FeasibleCandidate)), key=lambda item: item.seconds)
    rejected = [item for item in results if isinstance(item, RejectedCandidate)]
    lag = min((item.lag for item in feasible), default=0)
    for item in list(feasible):
        if item.lag == lag:
            checked = item if item.checked is not None else check(item.candidate)
            if isinstance(checked, FeasibleCandidate):
                feasible[feasible.index(item)] = checked
                break
            feasible.remove(item)
            rejected.append(checked)
    return tuple(feasible), tuple(rejected)


def check(candidate: Candidate) -> FeasibleCandidate | RejectedCandidate:
    """Plan and simulate a candidate, as ``run`` and ``simulate`` would."""
    if candidate.assignment is None:
        return RejectedCandidate(candidate, candidate.reason)
    try:
        planned = make_planned(candidate)
    except UserError as error:
        return RejectedCandidate(candidate, str(error))
    peak, share = _fullest(planned.plan)
    if share > 1:
        return RejectedCandidate(candidate, f"needs {bytes_text(int(peak))} on a device, {share:.0%} of its memory")
    return FeasibleCandidate(candidate, planned.simulation.seconds, peak, share, planned)


def make_planned(candidate: Candidate) -> PlannedCandidate:
    """Plan and simulate a candidate. Raises UserError where it cannot be planned."""
    plan = make_plan(candidate.spec)
    return PlannedCandidate(plan, simulate(plan, candidate.space.costs, candidate.space.lengths))


def estimate(candidate: Candidate) -> FeasibleCandidate | RejectedCandidate:
    """Do as ``check``, by the search's own seconds and bytes."""
    if candidate.assignment is None:
        return RejectedCandidate(candidate, candidate.reason)
    pool, assignment = candidate.space.pool, candidate.assignment
    used = {at: device_bytes(assignment, at) for at in {choice.start for choice in assignment}}
    memory = {at: pool.memory[pool.kinds_of(at, 1)[0]] / USABLE for at in used}
    fullest = max(used, key=lambda at: used[at] / memory[at])
    seconds = seconds_of(candidate.space, assignment)
    return FeasibleCandidate(candidate, seconds, used[fullest], used[fullest] / memory[fullest])


def _fullest(plan: Plan) -> tuple[float, float]:
    """Bytes on the device whose memory is filled most, and the share of its memory."""
    shares = [
        (memory.peak_bytes / size if (size := plan.cluster.memory_bytes(memory.rank)) else 0.0, memory.peak_bytes)
        for memory in plan.memories
    ]
    share, peak = max(shares)
    return float(peak), share


SIMULATED = "a step as simulated"
"""Words that the first line of an advised YAML has."""


def is_advised(text: str) -> bool:
    """Whether a text begins as those of ``write_advised``."""
    first = text.partition("\n")[0]
    return first.startswith("# ") and SIMULATED in first


def write_advised(chosen: FeasibleCandidate, path: Path) -> None:
    """Write the YAML of ``chosen``, with its origin in a comment. Raises UserError where it cannot be written."""
    seconds, candidate = chosen.seconds, chosen.candidate
    head = [
        f"# {candidate.method}: {candidate.name}; {seconds:.2f} s {SIMULATED}, {bytes_text(int(chosen.peak))}",
        "# models have sizes only (init): give the paths of their weights instead, and of the data",
    ]
    models = candidate.spec.models
    roles = candidate.space.roles.all
    has_sizes = any((model := models.of(role)) is not None and model.init is not None for role in roles)
    try:
        path.write_text("\n".join([*head[: 1 + has_sizes], dump_spec(with_names(candidate.spec), short=True)]))
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from None
