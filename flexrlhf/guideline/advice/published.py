"""Published placements: rules for where models go, each reported when it fires, and usual placements.

FlexRLHF's guideline decides (strategy, shares, settings); HybridFlow (Sheng et al., EuroSys 2025, section 8.3) and ReaL
(Mei et al., MLSys 2025, section 8) comment on the outcome. Usual placements of published systems are in the engines of
a spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.guideline.advice.candidates import Candidate, offload_sets, offloaded_spaces
from flexrlhf.guideline.advice.proposals import (
    TOO_LARGE,
    Allowed,
    Vector,
    choose_settings,
    fastest_chunking,
    vector_ranks,
)
from flexrlhf.guideline.advice.request import PPO_ROLES
from flexrlhf.guideline.advice.sketch import SearchModel
from flexrlhf.guideline.advice.space import Space, is_allowed, on_all_devices
from flexrlhf.guideline.search.branch_and_bound import search
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import UNLIMITED, Assignment
from flexrlhf.strategies.strategy import COLOCATED, DISAGGREGATED, INTERLEAVING
from flexrlhf.text import bytes_text
from flexrlhf.weights.shapes import DTYPE_BYTES, count_elements

FEW_NODES = 2
LEAST_SHADOW, MOST_SHADOW = Fraction(3, 10), Fraction(1, 2)
STATIC_SHARE = 0.6
INFERENCE_SHARE = 0.5
"""Share of a node's memory that the weights of a model for inference may fill: the rest is for its activations."""
PUBLISHED = "FlexRLHF, guideline"


@dataclass(frozen=True)
class GuidelineRule:
    """A rule that fired.

    name:    the rule in a few words.
    source:  where it is published.
    reason:  why it fired.
    strategy: name of the strategy that it leads to; empty: to none in particular.
    """

    name: str
    source: str
    reason: str
    strategy: str = ""


FILL_MEMORY = GuidelineRule("fill memory", PUBLISHED, "micro-batches as large as pay within it (95 % there)")


@dataclass(frozen=True)
class GuidelineResult:
    """Placement by the rules.

    strategy:    name of the strategy.
    space:       the space that it is a placement of.
    vector:      placement ratios; empty if ranks follow from classes of devices.
    rules:       the rules that fired.
    assignment:  meshes and settings; None if nothing that the rules allow fits.
    """

    strategy: str
    space: Space
    vector: Vector
    rules: tuple[GuidelineRule, ...]
    assignment: Assignment | None


@dataclass(frozen=True)
class MemorySizes:
    """Bytes of the models of a spec, and of the devices of its cluster.

    smallest_device:  bytes of the device with least memory.
    weights:          role → bytes of its weights.
    static_share:     share of all devices' memory that weights, gradients and optimizers fill when sharded over all.
    """

    smallest_device: float
    weights: Mapping[str, float]
    static_share: float


def memory_sizes(space: Space) -> MemorySizes:
    """Return the bytes of the models of ``space`` and of its devices."""
    smallest = min(map(space.memory_of, space.pool.nodes))
    weights, states = {}, {}
    for role in space.roles.all:
        settings, shape = space.spec.models.of(role), space.shapes[role]
        assert settings is not None, f"{role} is resolved"
        item, trained = DTYPE_BYTES[settings.dtype], count_elements(shape.trained)
        weights[role] = float(item * shape.num_parameters)
        # float32 gradients, master weights and two moments (HybridFlow, section 8.1)
        states[role] = weights[role] + 16.0 * trained * (role in space.roles.trained)
    return MemorySizes(smallest, weights, sum(states.values()) / (smallest * space.pool.num_devices))


def guideline(plain: Space, shadowed: Space | None) -> GuidelineResult:
    """Apply the rules. ``plain``: the space without shadows. ``shadowed``: with them, where the algorithm has any."""
    sizes = memory_sizes(plain)
    if len(plain.devices) > 1:
        result = _by_class(plain)
    elif shadowed is not None and plain.cluster.num_nodes > FEW_NODES:
        result = _disaggregated(shadowed)
    elif (rule := _fits_a_node(plain, sizes)) is not None and plain.pool.num_devices > 1:
        result = _interleaved(plain, rule)
    else:
        result = _colocated(plain, sizes)
    return replace(result, rules=(*result.rules, *_comments(result, sizes)))


def _fits_a_node(space: Space, sizes: MemorySizes) -> GuidelineRule | None:
    """Rule that fires where one of several models for inference fits one node: they may share the devices by halves."""
    frozen, node = _frozen(space), sizes.smallest_device * space.pool.per_node
    for role in frozen if len(frozen) > 1 else ():
        if sizes.weights[role] <= INFERENCE_SHARE * node:
            room = f" ({bytes_text(int(node))})" if sizes.smallest_device < UNLIMITED else ""
            weights = bytes_text(int(sizes.weights[role]))
            reason = f"{role} ({weights}) fits one node{room} of {space.cluster.num_nodes}"
            return GuidelineRule("interleave what fits a node", PUBLISHED, reason, INTERLEAVING)
    return None


def _frozen(space: Space) -> tuple[str, ...]:
    """Roles that are not trained."""
    return tuple(role for role in space.roles.all if role not in space.roles.trained)


def _by_class(space: Space) -> GuidelineResult:
    """Place trained models on the strongest class, models for inference on the largest of the others."""
    strongest, *others = space.cluster.classes_by_strength
    older = max(others, key=lambda name: len(space.cluster.ranks_on(name)))
    training, inference = space.cluster.ranks_on(strongest), space.cluster.ranks_on(older)
    ranks = {role: training if role in space.roles.trained else inference for role in space.roles.all}
    reason = f"trained models on {len(training)} {strongest}, models for inference on {len(inference)} {older}"
    rules = (GuidelineRule("older devices infer", "FlexRLHF, mixed clusters", reason), FILL_MEMORY)
    are_runs = all(mine[-1] - mine[0] + 1 == len(mine) for mine in (training, inference))
    assignment = _assignment(space, ranks, _one_node_replicas) or _assignment(space, ranks) if are_runs else None
    return GuidelineResult(INTERLEAVING, space, (), rules, assignment)


def _interleaved(space: Space, rule: GuidelineRule) -> GuidelineResult:
    half, frozen = Fraction(1, 2), _frozen(space)
    vector = tuple(half if role in frozen else Fraction(1) for role in space.roles.all)
    assignment = _assignment(space, vector_ranks(space, vector), _one_node_replicas)
    if assignment is None:
        return _colocated(space, memory_sizes(space))
    return GuidelineResult(INTERLEAVING, space, vector, (rule, FILL_MEMORY), assignment)


def _colocated(space: Space, sizes: MemorySizes) -> GuidelineResult:
    vector = tuple(Fraction(1) for _ in space.roles.all)
    ranks = vector_ranks(space, vector)
    devices = space.pool.num_devices
    reason = f"{devices} devices; states fill {sizes.static_share:.0%} of their memory when sharded over all"
    rules = (GuidelineRule("co-locate where devices are scarce", PUBLISHED, reason, COLOCATED), FILL_MEMORY)
    assignment = _assignment(space, ranks, _one_node_replicas) or _assignment(space, ranks)
    return GuidelineResult(COLOCATED, space, vector, rules, assignment)


def _assignment(
    space: Space, ranks: Mapping[str, tuple[int, ...]] | None, allowed: Allowed | None = None
) -> Assignment | None:
    """Settings for models on ``ranks``; None if there are no ranks, or nothing fits."""
    assignment = None if ranks is None else choose_settings(space, ranks, allowed)
    return None if isinstance(assignment, str) else assignment


def _disaggregated(space: Space) -> GuidelineResult:
    """Give the shadow actor the share of 30 to 50 % of the devices under which a step is shortest."""
    timed: list[tuple[float, Vector, Assignment]] = []
    problem = space.problem
    for vector in _shadow_vectors(space):
        assignment = _assignment(space, vector_ranks(space, vector), _one_node_replicas)
        if assignment is not None:
            timed.append((evaluate(problem, assignment), vector, assignment))
    rules = [
        GuidelineRule("disaggregate beyond two nodes", PUBLISHED, f"{space.cluster.num_nodes} nodes", DISAGGREGATED)
    ]
    if not timed:
        return GuidelineResult(DISAGGREGATED, space, (), tuple(rules), None)
    _, vector, assignment = min(timed, key=lambda item: item[:2])
    _, space, assignment = fastest_chunking(space, [assignment])
    share = f"it has {float(vector[0]):.0%} of {space.pool.num_devices} devices"
    rules += [
        GuidelineRule("a shadow actor of 30 to 50 %", PUBLISHED, share),
        GuidelineRule("a replica per node, not across", PUBLISHED, "the shadow's replicas stay inside nodes"),
        GuidelineRule("even out the phases", PUBLISHED, _phases(space, assignment)),
        FILL_MEMORY,
    ]
    return GuidelineResult(DISAGGREGATED, space, vector, tuple(rules), assignment)


def _shadow_vectors(space: Space) -> Iterator[Vector]:
    """Vectors that give the shadow actor and training whole nodes, and the rest to other inference.

    Steps are eighths of a small cluster, sixteenths of a large one.
    """
    total, node = space.pool.num_devices, space.pool.per_node
    unit = max(1, min(node, total // 8), total // 16 // node * node)
    for shadow in range(unit, total, unit):
        if LEAST_SHADOW <= Fraction(shadow, total) <= MOST_SHADOW:
            for training in range(unit, total - shadow + 1, unit):
                rest = total - training - shadow
                if rest > 0 or training + shadow == total:
                    yield _vector(space, shadow, training, rest or shadow, total)


def _vector(space: Space, shadow: int, training: int, rest: int, total: int) -> Vector:
    """Ratios of ``shadow`` devices for the shadow actor, ``training`` for training and ``rest`` for other inference."""
    sizes = [shadow if role == space.roles.trained[0] else rest for role in space.roles.trained]
    sizes += [training if role in space.roles.trained else rest for role in space.roles.all]
    return tuple(Fraction(size, total) for size in sizes)


def _phases(space: Space, assignment: Assignment) -> str:
    """Seconds of the slowest model in each phase."""
    slowest = {"generate": 0.0, "forward": 0.0, "train": 0.0}
    for model, choice in zip(space.models, assignment, strict=True):
        for phase in slowest:
            calls = zip(model.calls, choice.option.seconds, strict=True)
            slowest[phase] = max(slowest[phase], sum(seconds for call, seconds in calls if call.kind == phase))
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in slowest.items())


def _one_node_replicas(model: SearchModel, settings: ModelSpec) -> bool:
    """Whether a copy that only generates is whole inside a node: no weights cross the network at every token."""
    return "generate" not in model.kinds or model.trained or settings.zero == 0


def _comments(result: GuidelineResult, sizes: MemorySizes) -> Iterator[GuidelineRule]:
    """Rules of HybridFlow and ReaL that fire; they change nothing."""
    if sizes.static_share < STATIC_SHARE:
        reason = f"states fill {sizes.static_share:.0%} of memory: seconds fall less than the number of devices rises"
        yield GuidelineRule("static memory under 60 %", "ReaL, section 8", reason)
    devices = result.space.pool.num_devices
    if devices <= 64:
        reason = f"{devices} devices: models that share all of them leave fewest idle"
        yield GuidelineRule("co-locate small clusters", "HybridFlow, section 8.3", reason, COLOCATED)
    else:
        reason = f"{devices} devices: a batch split over all no longer fills them, so stages run in parallel"
        yield GuidelineRule("distribute on large clusters", "HybridFlow, section 8.3", reason)
    largest = max(result.space.roles.trained, key=lambda role: sizes.weights[role])
    if sizes.weights[largest] > 1.5 * sizes.weights.get("actor", sizes.weights[largest]):
        reason = f"{largest} is the largest: it gets the most devices, so that trainings end together"
        yield GuidelineRule("devices by size of the trained models", "HybridFlow, section 8.3", reason)


def usual(space: Space, seconds: float, gap: float) -> Iterator[Candidate]:
    """Yield the placements: all models on all devices with the settings that are fastest, or those of DeepSpeed-Chat
    and OpenRLHF, HybridFlow's split and the symmetric heuristic of ReaL's comparison.

    seconds:  work of the search for the settings of the first, in seconds that it takes on an ordinary core.
    gap:      share of its time by which it may miss the fastest settings.
    """
    roles, one = space.roles.all, Fraction(1)
    everywhere = (one,) * len(roles)
    yield _usual_colocated(space, seconds, gap)
    yield _usual(space, f"{COLOCATED} ZeRO-3", everywhere, _is_zero3)
    yield _usual(space, "standalone", (one / len(roles),) * len(roles))
    if set(roles) == set(PPO_ROLES):
        yield _usual(space, "split", (one / 2,) * len(roles))
    widest = min(8, space.pool.per_node)
    yield _usual(space, f"symmetric, tp {widest}", everywhere, lambda model, settings: settings.tp == widest)


def _is_zero3(model: SearchModel, settings: ModelSpec) -> bool:
    """Whether a model is sharded by ZeRO-3 alone; a rollout engine never is."""
    return model.is_rollout or (settings.zero == 3 and settings.tp == 1)


def _usual_colocated(space: Space, seconds: float, gap: float) -> Candidate:
    """Return all models on all devices, each with its fastest settings that fit."""
    result = search(on_all_devices(space), seconds, gap)
    if result.is_feasible and is_allowed(result.seconds):
        return Candidate("usual", COLOCATED, space, result.assignment)
    return Candidate("usual", COLOCATED, space, None, TOO_LARGE if result.pruned_by_memory else "no settings there")


def _usual(space: Space, name: str, vector: Vector, allowed: Allowed | None = None) -> Candidate:
    """Return the placement of ``vector``, with idle models in host memory if nothing fits otherwise."""
    ranks = vector_ranks(space, vector)
    if ranks is None:
        return Candidate("usual", name, space, None, "these shares are no whole devices, or of several classes")
    assignment = choose_settings(space, ranks, allowed)
    for label, variant in offloaded_spaces(space, offload_sets(space)) if assignment == TOO_LARGE else ():
        found = choose_settings(variant, ranks, allowed)
        if not isinstance(found, str):
            return Candidate("usual", f"{name}, {label}", variant, found)
    if isinstance(assignment, str):
        return Candidate("usual", name, space, None, assignment)
    return Candidate("usual", name, space, assignment)
