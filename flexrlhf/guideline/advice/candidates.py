"""Placements to compare, planned and simulated; a misfit has its reason.

Some are searched with idle models in host memory. A plan offloads models where a device would overflow, the one that is
used farthest in the future first (``strategies/residency.py``). A search counts two transfers for each time that such a
model is used, which is about as many or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from flexrlhf.api import Plan, SettingError, Spec, Strategy, UserError, bytes_text, make_plan
from flexrlhf.guideline.advice.limits import SpaceLimits
from flexrlhf.guideline.advice.proposals import fastest_options, spec_of
from flexrlhf.guideline.advice.space import Space
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice, device_bytes
from flexrlhf.guideline.simulation.simulate import Simulation, simulate

Method = Literal["guideline", "search", "usual"]


@dataclass(frozen=True)
class Candidate:
    """A placement to compare.

    method:      where it comes from.
    name:        unique within its method.
    space:       the space that it is a placement of.
    assignment:  its meshes and settings; None where nothing is possible.
    reason:      why nothing is possible.
    searched:    the assignment with settings of the search, if others were then chosen.
    """

    method: Method
    name: str
    space: Space
    assignment: Assignment | None
    reason: str = ""
    searched: Assignment | None = None

    @cached_property
    def spec(self) -> Spec:
        assert self.assignment is not None, "a candidate without settings is rejected"
        return spec_of(self.space, self.assignment)

    @property
    def strategy(self) -> str:
        if self.space.has_shadows:
            return Strategy.DISAGGREGATED
        sizes = {choice.size for choice in self.assignment or ()}
        return Strategy.COLOCATED if sizes == {self.space.pool.num_devices} else Strategy.INTERLEAVING


@dataclass(frozen=True)
class FeasibleCandidate:
    """A candidate whose plan fits.

    candidate:   the candidate.
    simulation:  of its plan.
    seconds:     of a step.
    peak:        bytes on the fullest device.
    share:       share of the memory that plans can fill there.
    """

    candidate: Candidate
    simulation: Simulation
    seconds: float
    peak: float
    share: float

    @property
    def excess(self) -> float:
        """Memory that its plan takes over the most that plans of its space may take."""
        return self.share / self.candidate.space.usable

    @property
    def limits(self) -> SpaceLimits:
        """Limits of its space within which plans take less memory."""
        return _with_less_memory(self.candidate, self.excess, self.plan.most_communicators)

    @property
    def plan(self) -> Plan:
        return self.simulation.plan

    @property
    def samples_per_second(self) -> float:
        return self.candidate.space.batch.num_taken / self.seconds

    @property
    def lag(self) -> int:
        return self.candidate.space.spec.schedule.lag


@dataclass(frozen=True)
class RejectedCandidate:
    """A candidate that is impossible, or does not fit.

    candidate:      the candidate.
    reason:         why.
    error:          of its plan, if that is about a setting.
    share:          share of a device's memory that its plan needs; 0 without one.
    communicators:  of the rank of its plan that has most.
    is_again:       whether another one was then proposed, without what was rejected.
    is_unplanned:   whether it was not planned, since another is faster.
    """

    candidate: Candidate
    reason: str
    error: SettingError | None = None
    share: float = 0.0
    communicators: int = 0
    is_again: bool = False
    is_unplanned: bool = False

    @property
    def limits(self) -> SpaceLimits:
        """Limits of its space within which it is not found again."""
        space, assignment = self.candidate.space, self.candidate.assignment
        assert assignment is not None, "nothing is left to reject"
        if not self.share:
            return space.limits.without(assignment, self.error)
        return _with_less_memory(self.candidate, self.share, self.communicators)


def _with_less_memory(candidate: Candidate, needed: float, communicators: int) -> SpaceLimits:
    """Return tighter limits for a candidate's space, whose plan exceeds the memory.

    needed:         memory of the plan, relative to what it may take.
    communicators:  number of communicators in the plan; more than the search assumed explain the excess, and are the
                    only limit that changes then.
    """
    space, assignment = candidate.space, candidate.assignment
    assert assignment is not None, "what has a plan has settings"
    if communicators > space.communicators:
        return replace(space.limits, communicators=communicators)
    pool, starts = space.pool, {choice.start for choice in assignment}
    counted = max(device_bytes(assignment, at) / pool.memory[pool.kinds_of(at, 1)[0]] for at in starts)
    return space.limits.below(needed, counted)


def check(candidate: Candidate) -> FeasibleCandidate | RejectedCandidate:
    """Plan and simulate a candidate, as ``run`` and ``simulate`` would."""
    if candidate.assignment is None:
        return RejectedCandidate(candidate, candidate.reason)
    try:
        plan = make_plan(candidate.spec, candidate.space.pending)
    except UserError as error:
        # a traceback would keep the plan's memory
        of_setting = error.with_traceback(None) if isinstance(error, SettingError) else None
        return RejectedCandidate(candidate, str(error), of_setting)
    cluster, communicators = candidate.space.cluster, plan.most_communicators
    planned = [plan.device_bytes(memory.rank) or 0 for memory in plan.memories]
    # its YAML may have a smaller memory_gb than the devices
    whole = [cluster.memory_bytes(memory.rank, communicators) or 0 for memory in plan.memories]
    for sizes in (planned, whole):
        peak, share = _fullest(plan, sizes)
        if share > 1:
            reason = f"needs {bytes_text(int(peak))} on a device, {share:.0%} of its memory"
            return RejectedCandidate(candidate, reason, share=share, communicators=communicators)
    simulation = simulate(plan, candidate.space.costs, candidate.space.lengths)
    return FeasibleCandidate(candidate, simulation, simulation.seconds, peak, share)


def _fullest(plan: Plan, sizes: Iterable[int]) -> tuple[float, float]:
    """Bytes on the device whose memory is filled most, and the share of its memory. ``sizes``: bytes of each rank."""
    shares = [
        (memory.peak_bytes / size if size else 0.0, memory.peak_bytes)
        for memory, size in zip(plan.memories, sizes, strict=True)
    ]
    share, peak = max(shares)
    return float(peak), share


def ranked(feasible: Iterable[FeasibleCandidate]) -> tuple[FeasibleCandidate, ...]:
    """Return the candidates, the fastest first; of equally fast ones that of a search.

    One with offloaded models is left out if one with fewer has the same placement and settings.
    """
    fastest = sorted(feasible, key=lambda item: (item.seconds, item.candidate.method != "search"))
    return tuple(item for item in fastest if not _is_repeated(item, fastest))


def _is_repeated(item: FeasibleCandidate, feasible: Sequence[FeasibleCandidate]) -> bool:
    """Whether a candidate with fewer offloaded models has the same placement and settings."""
    own = item.candidate
    fewer = (other.candidate for other in feasible if len(other.candidate.space.offloaded) < len(own.space.offloaded))
    return any(_settings(other.spec) == _settings(own.spec) for other in fewer)


def _settings(spec: Spec) -> tuple[object, ...]:
    return spec.placement, spec.models, spec.rollout, spec.schedule


def offloaded_spaces(space: Space) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) with sets of models in host memory while others compute: those that are not trained; all but
    one that a rollout engine on the same devices follows; all, so that this one and the engine are there together only
    while weights are sent."""
    # a rollout engine has a sleep of its own
    names = (name for name in space.names if not name.is_rollout)
    idle = frozenset(name for name in names if any(space.sketch.switches(name)))
    frozen = frozenset(name for name in idle if name not in space.roles.trained)
    followed = frozenset() if space.has_shadows else frozenset(each.role for each in space.sketch.placement.followers)
    sets = {"frozen models": frozen, "idle models": idle - followed, "all models": idle}
    tried: dict[frozenset[str], str] = {}
    for label, members in sets.items():
        if members and tried.setdefault(members, label) == label:
            yield f"{label} offloaded", replace(space, offloaded=members)


def is_short_of_memory(space: Space, best: Assignment, seconds: float, margin: float) -> bool:
    """Whether a step with more memory, on the meshes of ``best`` or with all models on all devices, is shorter than
    ``seconds``, and no tie with them.

    ``margin``: share of the shorter step by which the other may be longer in a tie.
    """
    problem = space.problem
    total = space.pool.num_devices
    for meshes in (best, tuple(replace(choice, start=0, size=total) for choice in best)):
        fastest = [fastest_options(problem, choice) for choice in meshes]
        whole: tuple[Choice, ...] = tuple(choice for choice in fastest if choice is not None)
        if len(whole) == len(best) and (1 + margin) * evaluate(problem, whole) < seconds:
            return True
    return False
