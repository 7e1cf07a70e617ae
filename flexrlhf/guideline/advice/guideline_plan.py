"""Placement that FlexRLHF's guideline leads to (section IV-C), and why it misses a rule where none can follow it.

The rules themselves, by which any plan is judged, are in ``guideline_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from flexrlhf.api import ModelName, ModelSpec, Strategy
from flexrlhf.guideline.advice import guideline_rules
from flexrlhf.guideline.advice.candidates import offloaded_spaces
from flexrlhf.guideline.advice.proposals import Allowed, choose_settings, in_space, vector_ranks
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.space import Space, chunk_counts, with_schedule, with_syncs_in_turn
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment

RanksByName = Mapping[str, tuple[int, ...]]
"""Placed model → its ranks."""
Misses = Mapping[str, str]
"""Name of a rule that a placement cannot follow → why."""
STEPS = 16
"""Parts of a cluster by which shares are moved."""


@dataclass(frozen=True)
class GuidelineResult:
    """Placement by the guideline.

    name:        its strategy, and which models are in host memory.
    space:       the space that it is a placement of.
    assignment:  meshes and settings; None if nothing fits.
    misses:      rules that it cannot follow, each with the reason.
    """

    name: str
    space: Space
    assignment: Assignment | None
    misses: Misses


def guideline(plain: Space, shadowed: Space | None) -> GuidelineResult:
    """Apply the rules. ``plain``: the space without shadows. ``shadowed``: with them, where the algorithm has any.

    Syncs of shadows are in turn unless the YAML says otherwise: weights under way would take memory that shares need.
    """
    if shadowed is not None and shadowed.spec.sync.overlap == "auto":
        shadowed = with_syncs_in_turn(shadowed)
    if len(plain.devices) > 1:
        return _until_full(plain, lambda space: _by_class(space, shadowed and replace(shadowed, usable=space.usable)))
    found = (
        _until_full(shadowed, _disaggregated)
        if shadowed and plain.cluster.num_nodes > guideline_rules.FEW_NODES
        else None
    )
    if found is not None and found.assignment is not None:
        return found
    whole = _until_full(plain, _on_few_nodes)
    misses = {} if found is None else {guideline_rules.DISAGGREGATE.name: "neither side has the memory for its models"}
    return replace(whole, misses={**whole.misses, **misses})


def _until_full(space: Space, place: Callable[[Space], GuidelineResult]) -> GuidelineResult:
    """Return what ``place`` finds on devices that are filled to 95 %, else on full ones."""
    found = place(replace(space, usable=min(guideline_rules.FULL, space.usable)))
    if found.assignment is not None:
        return found
    full = place(replace(space, usable=1.0))
    return replace(full, misses={guideline_rules.STOP_BEFORE_FULL.name: "less memory is not enough", **full.misses})


# --- one or two nodes


def _on_few_nodes(space: Space) -> GuidelineResult:
    """Interleave models for inference by halves if one of them fits a node, else co-locate all."""
    sizes = guideline_rules.memory_sizes(space.spec, space.shapes, space.roles.trained, space.cluster)
    halves, whole = Fraction(1, 2), Fraction(1)
    if guideline_rules.fitting_role(sizes, space.roles.trained, space.cluster) is None:
        return _colocated(space, {})
    vector = tuple(whole if role in space.roles.trained else halves for role in space.roles.all)
    ranks = vector_ranks(space, vector)
    found = None if ranks is None else _first_that_fits(space, [ranks])
    if found is None:
        why = "halves are no whole devices" if ranks is None else "halves of the devices lack memory for it"
        return _colocated(space, {guideline_rules.INTERLEAVE.name: why})
    return replace(found, name=Strategy.INTERLEAVING)


def _colocated(space: Space, misses: Misses) -> GuidelineResult:
    """Return all models on all devices, with idle ones in host memory if they do not fit otherwise."""
    everywhere: RanksByName = {name: tuple(range(space.pool.num_devices)) for name in space.names}
    return _with_idle_offloaded(space, everywhere, Strategy.COLOCATED, misses)


def _with_idle_offloaded(space: Space, ranks: RanksByName, name: str, misses: Misses) -> GuidelineResult:
    """Return the placement on ``ranks``, with idle models in host memory if they do not fit otherwise."""
    for label, variant in (("", space), *offloaded_spaces(space)):
        found = _first_that_fits(variant, [ranks])
        if found is not None:
            whole = f"{name}, {label}" if label else name
            return replace(found, name=whole, misses={**found.misses, **misses})
    return GuidelineResult(name, space, None, misses)


# --- more nodes


def _disaggregated(space: Space) -> GuidelineResult:
    """Move the shares of training, of the shadow actor and of other inference until phases are even."""
    total, step = space.pool.num_devices, _step(space.pool.num_devices, space.pool.per_node)
    sizes = [
        each
        for each in range(step, total, step)
        if guideline_rules.LEAST_SHADOW <= Fraction(each, total) <= guideline_rules.MOST_SHADOW
    ]
    shared = [_apart(space, total - size, size, 0) for size in sizes]
    alone = [
        _apart(space, training, size, total - size - training)
        for size in sizes
        for training in range(step, total - size, step)
    ]
    own = (name for name in space.names if name not in space.roles.trained)
    is_only_one = all(name == _shadow_actor(space) for name in own)
    ways: Sequence[tuple[Sequence[RanksByName], Misses]] = (
        (alone, {}),
        (shared, {guideline_rules.SHADOW_SHARE.name: "devices of its own leave others too little memory"}),
    )
    for groups, misses in ((shared, {}),) if is_only_one else ways:
        found = _first_that_fits(space, groups)
        if found is not None:
            return replace(found, misses={**found.misses, **misses})
    return GuidelineResult(Strategy.DISAGGREGATED, space, None, {})


def _step(total: int, per_node: int) -> int:
    """Return the devices by which shares are moved, in whole nodes if they are larger."""
    return max(1, min(per_node, total // STEPS), total // STEPS // per_node * per_node)


def _apart(space: Space, training: int, shadow: int, rest: int) -> RanksByName:
    """Return ranks of so many devices each: training on the first, the shadow actor on the last, so that neither has a
    replica on two nodes. No ``rest``, or no other model: all inference is with the shadow actor."""
    total, own = training + shadow + rest, _shadow_actor(space)
    alone, others = range(training + rest, total), range(training, training + rest)
    return {
        name: tuple(range(training) if name in space.roles.trained else alone if name == own else others or alone)
        for name in space.names
    }


def _shadow_actor(space: Space) -> ModelName | None:
    return next((name for name in space.names if name.copy and name.role == space.graph.generated), None)


# --- devices of several classes


def _by_class(plain: Space, shadowed: Space | None) -> GuidelineResult:
    """Place trained models on the strongest class and models for inference on the largest of the others, with shadows
    on devices of the strongest class that training can spare."""
    strongest, *others = plain.cluster.classes_by_strength
    newer = plain.cluster.ranks_on(strongest)
    older = max(map(plain.cluster.ranks_on, others), key=len)
    if not all(ranks[-1] - ranks[0] + 1 == len(ranks) for ranks in (newer, older)):
        return GuidelineResult(Strategy.INTERLEAVING, plain, None, {})
    misses = {guideline_rules.SPARE_SHADOW.name: "the algorithm or the YAML has none"}
    if shadowed is not None:
        step = _step(len(newer), plain.pool.per_node)
        spare = [_with_spare(shadowed, newer, older, size) for size in range(step, len(newer), step)]
        if (found := _first_that_fits(shadowed, spare)) is not None:
            return found
        misses = {guideline_rules.SPARE_SHADOW.name: f"training needs the memory of all {len(newer)} {strongest}"}
    ranks: RanksByName = {name: newer if name.role in plain.roles.trained else older for name in plain.names}
    return _with_idle_offloaded(plain, ranks, Strategy.INTERLEAVING, misses)


def _with_spare(space: Space, newer: Sequence[int], older: Sequence[int], spare: int) -> RanksByName:
    """Return ranks with the shadow actor on the last ``spare`` newer devices, and all other inference on older ones."""
    own = _shadow_actor(space)
    places = {True: tuple(newer[: len(newer) - spare]), False: tuple(older)}
    return {
        name: tuple(newer[len(newer) - spare :]) if name == own else places[name in space.roles.trained]
        for name in space.names
    }


# --- settings


def _first_that_fits(space: Space, groups: Sequence[RanksByName]) -> GuidelineResult | None:
    """Return the placement with the most even phases of ``groups`` of ranks, by as many rules as memory allows.

    Tried are weights that stay inside nodes, then others; None: nothing fits.
    """
    for stay in (True, False):
        found = _most_even(space, groups, stay)
        if found is not None:
            inside = {} if stay else {guideline_rules.IN_NODES.name: "copies that are whole inside nodes do not fit"}
            return replace(found, misses={**inside, **found.misses})
    return None


def _in_nodes(space: Space, ranks: RanksByName, stay: bool) -> Allowed:
    """Return which settings keep the ranks of a replica inside a node.

    stay:  whether the weights that a copy generates with stay there, too: they cross no network at every token.
    """
    node_of, per_node = space.cluster.node_of, space.cluster.most_on_node

    def allowed(model: SearchModel, settings: ModelSpec) -> bool:
        own, width = ranks.get(model.name) or ranks[model.role], settings.dims.width
        starts = own[: per_node * width : width]
        is_inside = width <= per_node and all(node_of(at) == node_of(at + width - 1) for at in starts)
        return is_inside and (not stay or "generate" not in model.kinds or model.trained or settings.zero == 0)

    return allowed


def _most_even(space: Space, groups: Sequence[RanksByName], stay: bool) -> GuidelineResult | None:
    """Return the fastest placement of those with even phases, else of all; None if nothing fits."""
    chosen = [choose_settings(space, ranks, _in_nodes(space, ranks, stay)) for ranks in groups]
    assignments = [each for each in chosen if not isinstance(each, str)]
    if not assignments:
        return None
    numbers = chunk_counts(space)
    pipelined = [number for number in numbers if number > 1] if space.has_shadows else []
    spaces = [with_schedule(space, number, space.spec.schedule.lag) for number in pipelined or numbers]
    timed = [
        (
            not guideline_rules.are_even(_phases(chunked, each).values()),
            evaluate(chunked.problem, each),
            index,
            chunked,
            each,
        )
        for chunked in spaces
        for index, each in enumerate(in_space(chunked, chunked.problem, each) for each in assignments)
    ]
    is_uneven, _, _, chunked, assignment = min(timed, key=lambda item: item[:3])
    misses = {}
    if space.has_shadows and not pipelined:
        misses[guideline_rules.EVEN_PHASES.name] = "the request has room for 1 chunk"
    elif space.has_shadows and is_uneven:
        misses[guideline_rules.EVEN_PHASES.name] = f"none of {len(assignments)} shares that fit are even"
    return GuidelineResult(Strategy.DISAGGREGATED, chunked, assignment, misses)


def _phases(space: Space, assignment: Assignment) -> dict[str, float]:
    """Return the seconds of each kind of calls on the device where they take longest."""
    phases = dict.fromkeys(("generate", "forward", "train"), 0.0)
    for at in {choice.start for choice in assignment}:
        on_device = dict.fromkeys(phases, 0.0)
        for model, choice in zip(space.models, assignment, strict=True):
            if choice.start <= at < choice.start + choice.size:
                for call, seconds in zip(model.calls, choice.option.seconds, strict=True):
                    if call.kind in on_device:
                        on_device[call.kind] += seconds
        phases = {kind: max(seconds, on_device[kind]) for kind, seconds in phases.items()}
    return phases
