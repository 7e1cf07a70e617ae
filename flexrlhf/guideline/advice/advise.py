"""Comparison of placements: by the published rules, an exact search, and the usual ones of published systems.

Each is planned and simulated like any other run. One that a plan rejects is proposed again without what was rejected;
those that do not fit are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

from flexrlhf.api import Cluster, EngineFacts, ModelSpec, Spec, UserError
from flexrlhf.guideline.advice.candidates import (
    Candidate,
    FeasibleCandidate,
    Method,
    RejectedCandidate,
    check,
    is_short_of_memory,
    offloaded_spaces,
    ranked,
)
from flexrlhf.guideline.advice.choice import Advice, is_full
from flexrlhf.guideline.advice.guideline_plan import GuidelineResult, guideline
from flexrlhf.guideline.advice.lags import with_larger_lags
from flexrlhf.guideline.advice.limits import RefusedSettings, SpaceLimits
from flexrlhf.guideline.advice.model_options import OptionEnumerator
from flexrlhf.guideline.advice.proposals import (
    TOO_LARGE,
    choose_settings,
    fastest_chunking,
    in_problem,
    with_fastest_settings,
)
from flexrlhf.guideline.advice.published import usual
from flexrlhf.guideline.advice.refinement import refined, with_planned_settings
from flexrlhf.guideline.advice.refusal import lag_text, last_resort, nothing_fits, refusal_text
from flexrlhf.guideline.advice.searched_step import is_allowed
from flexrlhf.guideline.advice.space import GAP, Space, make_space, with_schedule, with_syncs_in_turn
from flexrlhf.guideline.advice.waiting import least_waiting, waiting_variants
from flexrlhf.guideline.costs.cost_model import CostModel
from flexrlhf.guideline.costs.profiles import FROM_FIGURES
from flexrlhf.guideline.search.assignments import ROUNDING
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment
from flexrlhf.guideline.search.result import SearchResult
from flexrlhf.guideline.simulation.inputs import TextLengths, costs_for

CHUNKED = 3
"""Results of a search that are also tried in chunks."""
SECONDS = 15.0
"""Work of all searches together, in seconds of an ordinary core, where nothing else is set."""
LEAST_SHARE = 1 / 15
"""Share of them that a search may take after others have taken all."""
FULL = "memory full"
"""End of the labels of searches whose plans may fill all memory."""
LEAN = "activations offloaded"
"""End of the labels of searches with ``tiled_mlp`` and ``offload_activations``."""
USUAL_SECONDS = 4.0
"""Most work of the search for the settings of a usual placement."""
PROPOSALS = 6
"""Times that a method proposes a placement, each without what plans have rejected of the ones before."""
PLANS_SECONDS = 6.0
"""Work of plans after which only those are made that may be the fastest."""
PLAN_SECONDS, DEVICE_SECONDS = 0.02, 0.001
"""Work of a plan and of its simulation, and in addition for each device, in seconds of an ordinary core."""
ON_HOST: Mapping[str, object] = {"zero": 3, "offload_parameters": True}
"""Settings of a model whose shards are in host memory between passes."""
NEEDS_SHADOWS = "has no shadow models, which lag, rare syncs or the strategy of the YAML need"
"""Why a placement is no candidate."""


class PlacementComparison:
    """Candidates and searches of one request so far.

    base:           the space without shadows, as the YAML has its schedule.
    seconds_limit:  work of all searches together, in seconds that it takes on an ordinary core.
    proposed:       all placements that methods have proposed.
    feasible:       those whose plans fit.
    rejected:       the others.
    searches:       the spaces that were searched, by their labels.
    """

    def __init__(self, base: Space, seconds_limit: float) -> None:
        self.base = base
        self.proposed: list[Candidate] = []
        self.feasible: list[FeasibleCandidate] = []
        self.rejected: list[RejectedCandidate] = []
        self.searches: dict[str, SearchResult] = {}
        self._refused: tuple[RefusedSettings, ...] = ()
        self._seconds_limit = self._seconds_left = seconds_limit
        self._plan_seconds = 0.0

    def search(self, label: str, space: Space, seeds: Sequence[Assignment] = ()) -> bool:
        """Add the fastest placement of ``space`` that has a plan. Returns whether there is one."""

        def searched(limits: SpaceLimits) -> Candidate:
            limited = replace(space, limits=limits)
            result = search(limited.problem, self._next_seconds, GAP, seeds=seeds)
            self._seconds_left -= result.work
            self.searches[label] = result
            return _by_search(limited, label, result)

        is_found = self._propose(searched, space.limits)
        if not is_found:
            self.searches[label] = replace(self.searches[label], best=())
        return is_found

    def is_beaten(self, space: Space) -> bool:
        """Whether no search has found the fastest placement so far with shadows and the lag of ``space``."""
        lag = space.spec.schedule.lag
        alike = [item for item in self.feasible if item.candidate.space.has_shadows and item.lag == lag]
        return not alike or ranked(alike)[0].candidate.method != "search"

    def usual(self, plain: Space) -> None:
        """Add the usual placements of ``plain``."""
        plain = replace(plain, limits=replace(plain.limits, refused=self._refused))
        for candidate in usual(plain, min(USUAL_SECONDS, self._next_seconds), GAP):
            self._propose(partial(self._usual_again, candidate), plain.limits)

    def _usual_again(self, first: Candidate, limits: SpaceLimits) -> Candidate:
        """Return the usual placement that ``first`` is within ``limits``."""
        if limits == first.space.limits:
            return first
        space = replace(first.space, offloaded=frozenset(), limits=limits)
        again = usual(space, min(USUAL_SECONDS, self._next_seconds), GAP)
        return next(each for each in again if each.name.partition(", ")[0] == first.name.partition(", ")[0])

    def guideline(self, plain: Space, shadowed: Space | None) -> Mapping[str, str]:
        """Add the guideline's placement. Returns the rules that it cannot follow, with reasons.

        ``shadowed``: the space with shadows, if there is one.
        """
        found: list[GuidelineResult] = []

        def ruled(limits: SpaceLimits) -> Candidate:
            with_shadows = shadowed and replace(shadowed, limits=limits)
            found.append(guideline(replace(plain, limits=limits), with_shadows))
            result = found[-1]
            is_other = self.base.must_have_shadows and not result.space.has_shadows
            assignment, reason = (None, NEEDS_SHADOWS) if is_other else (result.assignment, TOO_LARGE)
            return Candidate("guideline", result.name, result.space, assignment, reason)

        self._propose(ruled, plain.limits)
        return found[-1].misses

    def _propose(self, make: Callable[[SpaceLimits], Candidate], limits: SpaceLimits) -> bool:
        """Add the placement that ``make`` returns, proposed again within narrower limits where a plan rejects it.

        So is one whose plan takes more than the space's share of memory; it is used if no other is found.
        Returns whether there is one that fits.
        """
        full: FeasibleCandidate | None = None
        for _ in range(PROPOSALS):
            # a rule holds for all methods
            limits = replace(limits, refused=self._refused)
            candidate = _with_strategy(make(limits), self.base)
            checked = self._check(candidate)
            if isinstance(checked, FeasibleCandidate):
                if checked.excess <= 1 + ROUNDING:
                    return self._accept(checked)
                full = full or checked
            else:
                is_last = checked.candidate.assignment is None
                self._reject(checked if is_last else replace(checked, is_again=True))
                if is_last:
                    return checked.is_unplanned or (full is not None and self._accept(full))
            limits = checked.limits
            self._refused = limits.refused
        return full is not None and self._accept(full)

    def _accept(self, item: FeasibleCandidate) -> bool:
        """Store a candidate that fits. Returns True."""
        self.proposed.append(item.candidate)
        self.feasible.append(item)
        return True

    def _reject(self, item: RejectedCandidate) -> None:
        """Store a rejected candidate, once for each reason."""
        known = ((each.candidate.method, each.candidate.name, each.reason) for each in self.rejected)
        if (item.candidate.method, item.candidate.name, item.reason) not in known:
            self.rejected.append(item)

    def _check(self, candidate: Candidate) -> FeasibleCandidate | RejectedCandidate:
        """Return the ``check`` of a candidate, which equals that of one with the same spec."""
        if candidate.assignment is None:
            return check(candidate)
        checked: list[FeasibleCandidate | RejectedCandidate] = [*self.feasible, *self.rejected]
        alike = (each for each in checked if each.candidate.assignment is not None)
        known = next((each for each in alike if each.candidate.spec == candidate.spec), None)
        if known is not None:
            return replace(known, candidate=candidate)
        if self._plan_seconds > PLANS_SECONDS and self.feasible:
            seconds = evaluate(candidate.space.problem, candidate.assignment)
            if seconds > min(item.seconds for item in self.feasible):
                reason = f"{seconds:.2f} s by a search; not planned, since another is faster"
                return RejectedCandidate(replace(candidate, assignment=None), reason, is_unplanned=True)
        self._plan_seconds += PLAN_SECONDS + DEVICE_SECONDS * candidate.space.pool.num_devices
        return check(candidate)

    @property
    def _next_seconds(self) -> float:
        """Seconds of the next search; most end long before, and the first ones may need most of the time."""
        return max(LEAST_SHARE * self._seconds_limit, self._seconds_left / 2)


def advise(
    spec: Spec,
    costs: CostModel | None = None,
    lengths: TextLengths | None = None,
    seconds_limit: float = SECONDS,
    margin: float | None = None,
    pending: Mapping[Path, ModelSpec] | None = None,
    obstacle: str = "",
    explains: bool = True,
    max_lag: int | None = None,
    known: list[OptionEnumerator] | None = None,
) -> Advice:
    """Compare placements of ``spec``; ``best.plan`` of the result is the recommended one.

    spec:           its placement is ignored; settings of models that it leaves open are chosen.
    costs:          cost model of calls and transfers; None: figures of the device classes, else this machine's
                    profile.
    lengths:        tokens of prompts and responses; None: the longest.
    seconds_limit:  work of all searches together, in seconds that it takes on an ordinary core: the same spec gets the
                    same advice on every machine. A refusal may take ``refusal.TRIES`` more.
    margin:         share of the fastest placement's seconds by which another one may be slower and count as equally
                    fast; None: the least difference of predictions that distinguishes two placements.
    pending:        directory → model, for models that an earlier run of the command will write there.
    obstacle:       why vLLM cannot generate, if that follows from an earlier run.
    explains:       whether to search for changes that would help if nothing fits.
    max_lag:        the largest lag of placements with shadows, where the YAML sets none; one with a lag may then be
                    chosen. None: 1, which is timed and not chosen. 0: none is timed.
    known:          enumerators of options of earlier spaces, which are used again and added to.

    Raises UserError if nothing fits, or the costs of a device are not known.
    """
    began = perf_counter()
    if costs is None:
        source = costs_for(spec, None)
        costs, margin = source.costs, source.accuracy.tie if margin is None else margin
    margin = FROM_FIGURES.tie if margin is None else margin
    base = make_space(spec.model_copy(update={"placement": None}), costs, lengths, pending, obstacle, known=known)
    compared = PlacementComparison(base, seconds_limit)
    most = 1 if max_lag is None else max_lag
    misses = {} if nothing_fits(base) else _compare(compared, margin, most)
    feasible, rejected = ranked(compared.feasible), tuple(compared.rejected)
    may_lag, own = max_lag is not None, _own_lag(base)
    refusal = _without_plan(feasible, rejected)
    advice = Advice(feasible, rejected, misses, compared.searches, 0.0, margin, refusal, most, may_lag, own)
    advice = with_planned_settings(advice)
    if most > 1:
        lagging, short = with_larger_lags(advice.feasible, most)
        advice = replace(advice, feasible=ranked((*advice.feasible, *lagging)), rejected=(*rejected, *short))
    if not (advice.comparable or advice.refusal) and (last := last_resort(base)) is not None:
        advice = replace(advice, feasible=ranked((*feasible, last)))
    for other in () if advice.comparable or advice.refusal else _on_deepspeed(spec, base.roles.trained):
        try:
            found = advise(other, costs, lengths, seconds_limit, margin, pending, obstacle, False, max_lag)
        except UserError:
            # settings that are written, such as tp, which this engine has not
            continue
        if found.comparable:
            return found
    if not (advice.comparable or advice.refusal) and (advice.feasible or explains):
        advice = replace(
            advice,
            refusal=lag_text(base, advice.feasible[0].lag) if advice.feasible else refusal_text(base, advice.rejected),
        )
    return _with_less_waiting(replace(advice, seconds=perf_counter() - began))


def with_kind(advice: Advice, take: Method) -> Advice:
    """Return ``advice`` with the fastest placement of one kind to use. Raises UserError if none fits."""
    return _with_less_waiting(replace(advice, take=take, waiting=()))


def _without_plan(feasible: Sequence[FeasibleCandidate], rejected: Sequence[RejectedCandidate]) -> str:
    """Return a refusal if no candidate has a plan, whatever memory there is; empty if one has, or none was planned."""
    planned = [each for each in rejected if each.candidate.assignment is not None]
    if feasible or not planned or any(each.share for each in planned):
        return ""
    return f"no placement of these models has a plan ({planned[-1].reason})"


def _with_less_waiting(advice: Advice) -> Advice:
    """Return ``advice`` with the processes for which the placement to use waits least for environments."""
    variants = waiting_variants(advice.best) if advice.comparable else ()
    opened = [each for each in variants if each.is_open]
    if not opened:
        return advice
    chosen = least_waiting(opened, advice.margin).found
    feasible = sorted(
        (chosen if item is advice.best else item for item in advice.feasible), key=lambda item: item.seconds
    )
    return replace(advice, feasible=tuple(feasible), waiting=variants)


def _on_deepspeed(spec: Spec, trained: Sequence[str]) -> Iterator[Spec]:
    """Yield ``spec`` with the engine whose optimizer states, and then ZeRO-3 shards too, can be in host memory, for
    trained models whose engine is not written; nothing if there is none, and on devices that are no GPUs of known
    classes."""
    of_all = spec.models.all
    models = {role: spec.models.of(role) or of_all or ModelSpec() for role in trained}
    written = {
        role: model.model_fields_set | (of_all.model_fields_set if of_all else set()) for role, model in models.items()
    }
    opened: dict[str, dict[str, object]] = {
        role: {"engine": EngineFacts.offloading_engine()} for role in trained if "engine" not in written[role]
    }
    if not opened or not Cluster.of(spec.cluster).has_known_gpus(spec.cluster):
        return
    on_host = {role: {**change, **ON_HOST} for role, change in opened.items() if not ON_HOST.keys() & written[role]}
    for changes in (opened, {**opened, **on_host}) if on_host else (opened,):
        yield spec.with_models({role: models[role].model_copy(update=change) for role, change in changes.items()})


def _compare(compared: PlacementComparison, margin: float, max_lag: int) -> Mapping[str, str]:
    """Collect the candidates of all methods. Returns the rules that the guideline's cannot follow, with reasons."""
    base = compared.base
    plain, spaces = with_schedule(base, base.spec.schedule.num_chunks, 0), list(_spaces(base, max_lag))
    shadowed = [space for _, space in spaces if space.has_shadows]
    misses = compared.guideline(plain, shadowed[0] if shadowed else None)
    if not base.must_have_shadows:
        compared.usual(plain)
    others = tuple(compared.proposed)
    for label, space in spaces:
        # the fastest without a lag is a start with one
        is_found = compared.search(label, space, _seeds(compared.proposed, space))
        # weights that travel in the background, although the YAML does not say so, need memory next to those in use
        may_wait = space.spec.sync.overlap == "auto" and space.spec.syncs_overlap
        if space.has_shadows and may_wait and (compared.is_beaten(space) or _has_large_copy(space)):
            label, space = f"{label}, syncs in turn", with_syncs_in_turn(space)
            is_found = compared.search(label, space, _seeds(compared.proposed, space)) or is_found
        if not is_found and space.leaner is not None:
            compared.search(f"{label}, {LEAN}", space.leaner)
    if not base.must_have_shadows:
        _compare_offloaded(compared, plain, others, margin)
    if all(is_full(item) or item.lag > _own_lag(base) for item in compared.feasible):
        for label, space in _full_spaces(base):
            compared.search(f"{label}, {FULL}", space, _seeds(compared.proposed, space))
    return misses


def _full_spaces(base: Space) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) of the searches without a lag of their own, whose plans may fill all memory."""
    for label, space in _spaces(base, 0):
        full = replace(space, usable=1.0)
        yield label, full
        if full.leaner is not None:
            yield f"{label}, {LEAN}", full.leaner
        if not space.has_shadows:
            yield from offloaded_spaces(full)


def _compare_offloaded(compared: PlacementComparison, plain: Space, others: Sequence[Candidate], margin: float) -> None:
    """Search placements with idle models in host memory, where memory makes a step longer or nothing fits."""
    label, first = next(iter(compared.searches.items()))
    lean = compared.searches.get(f"{label}, {LEAN}")
    space = plain if lean is None or plain.leaner is None else plain.leaner
    best = next((each for each in (first, lean) if each is not None and _is_found(each)), None)
    if best is not None and not is_short_of_memory(space, best.assignment, best.seconds, margin):
        return
    if lean is None and plain.leaner is not None and (best is None or _is_faster(plain.leaner, best)):
        # what a plan has rejected without, it rejects with it
        limits = next((each.space.limits for each in compared.proposed if each.name == label), plain.limits)
        compared.search(
            f"{label}, {LEAN}", replace(plain.leaner, limits=limits), _seeds(compared.proposed, plain.leaner)
        )
    for label, offloaded in offloaded_spaces(space):
        compared.search(label, offloaded, _seeds(others, offloaded))


def _is_faster(space: Space, best: SearchResult) -> bool:
    """Whether a step of ``space`` is faster than ``best`` on its meshes, or with all models on all devices."""
    own = {choice.part: choice.ranks for choice in best.assignment}
    for ranks in (own, dict.fromkeys(own, tuple(range(space.pool.num_devices)))):
        chosen = choose_settings(space, ranks)
        if not isinstance(chosen, str) and evaluate(space.problem, chosen) < (1 - GAP) * best.seconds:
            return True
    return False


def _own_lag(base: Space) -> int:
    """Return the lag that the YAML sets."""
    return base.spec.schedule.lag if "lag" in base.fixed_schedule else 0


def _seeds(candidates: Sequence[Candidate], space: Space) -> list[Assignment]:
    """Return the assignments of candidates that are placements of ``space`` in any number of chunks."""
    kind, problem = (space.has_shadows, space.offloaded), space.problem
    alike = (each for each in candidates if (each.space.has_shadows, each.space.offloaded) == kind)
    known = (each.searched or each.assignment for each in alike)
    seeds = [in_problem(problem, each) for each in known if each is not None]
    return [each for each in seeds if each is not None]


def _spaces(base: Space, max_lag: int) -> Iterator[tuple[str, Space]]:
    """Yield (label, space) of each search: with the lag that the YAML sets, else without and with one."""
    schedule, is_set = base.spec.schedule, "lag" in base.fixed_schedule
    if not base.must_have_shadows:
        yield "without shadows", with_schedule(base, schedule.num_chunks, 0)
    if base.may_have_shadows:
        shadowed = replace(base, has_shadows=True)
        for lag in [schedule.lag] if is_set else range(min(max_lag, 1) + 1):
            label = f"with shadows, lag {lag}" if lag else "with shadows"
            yield label, with_schedule(shadowed, schedule.num_chunks, lag)


def _has_large_copy(space: Space) -> bool:
    """Whether a rollout engine has experts: its weights are so many that memory for others on their way to it may cost
    more time than they take in turn."""
    sizes = [space.shapes[model.role].sizes for model in space.models if model.is_rollout]
    return any(each is not None and each.experts is not None for each in sizes)


def _is_found(result: SearchResult) -> bool:
    """Whether a search found a plan that fits and has no forbidden transfer."""
    return result.is_feasible and is_allowed(result.seconds)


def _by_search(space: Space, label: str, result: SearchResult) -> Candidate:
    if not _is_found(result):
        reason = TOO_LARGE if result.pruned_by_memory else "no placement of this kind is possible"
        return Candidate("search", label, space, None, reason)
    best = [
        with_fastest_settings(space, result.best[0].assignment),
        *(item.assignment for item in result.best[1:CHUNKED]),
    ]
    _, chunked, assignment = fastest_chunking(space, best)
    return Candidate("search", label, chunked, refined(chunked, assignment), searched=assignment)


def _with_strategy(candidate: Candidate, base: Space) -> Candidate:
    """Drop the assignment of a candidate that has another strategy than the YAML sets."""
    strategy = base.spec.schedule.strategy
    if strategy in (None, candidate.strategy) or candidate.assignment is None:
        return candidate
    return replace(candidate, assignment=None, reason=f"is {candidate.strategy}; schedule.strategy is {strategy}")
