"""Published rules for placements, each judged on a simulated plan: followed, contradicted or not applicable.

FlexRLHF's guideline (section IV-C) decides on a strategy, shares and settings. HybridFlow (Sheng et al., EuroSys 2025,
section 8.3) and ReaL (Mei et al., MLSys 2025, section 8) comment on the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from flexrlhf.api import Cluster, ModelShape, PlacedModel, Plan, Run, Spec, Strategy, bytes_text, counted
from flexrlhf.guideline.search.problem import UNLIMITED
from flexrlhf.guideline.simulation.simulate import Simulation

FEW_NODES = 2
LEAST_SHADOW, MOST_SHADOW = Fraction(3, 10), Fraction(1, 2)
EVEN = 1.5
"""Ratio of the longest to the shortest phase up to which phases count as even."""
FULL = 0.95
"""Share of a device's memory before which a batch stops growing."""
STATIC_SHARE = 0.6
INFERENCE_SHARE = 0.5
"""Share of a node's memory that the weights of a model for inference may fill: the rest is for its activations."""
FEW_DEVICES = 64
LARGER = 1.5
"""Ratio of its weights to the actor's from which on another trained model is the largest."""

RuleState = Literal["followed", "contradicted", "not applicable"]
Judgement = tuple[bool | None, str]
"""Whether a plan follows a rule, None if it does not apply, and the figures of the plan that show it."""


@dataclass(frozen=True)
class JudgedPlan:
    """A simulated plan that is judged.

    simulation:  of the plan.
    cluster:     its devices with all the memory that models can fill: a YAML may have less.
    """

    simulation: Simulation
    cluster: Cluster

    @property
    def plan(self) -> Plan:
        return self.simulation.plan

    @cached_property
    def sizes(self) -> MemorySizes:
        return memory_sizes(self.plan.spec, self.plan.shapes, self.plan.graph.trained, self.cluster)

    @property
    def is_small(self) -> bool:
        """Whether rules for few nodes apply, all of one class."""
        return self.cluster.num_nodes <= FEW_NODES and len(self.cluster.classes) == 1

    @property
    def nodes(self) -> str:
        """Return the nodes as a reason."""
        classes = len(self.cluster.classes)
        return f"{counted(self.cluster.num_nodes, 'node')}{f' of {classes} classes' if classes > 1 else ''}"

    @property
    def devices(self) -> int:
        return len(self.cluster.devices)

    @property
    def shadow_actor(self) -> PlacedModel | None:
        """Copy that generates on other ranks than those of the trained model."""
        generated = self.plan.graph.generated
        return next((model for model in self.plan.placement.shadows if model.role == generated), None)

    def classes_of(self, model: PlacedModel) -> set[str]:
        return {self.cluster.devices[rank].device_class for rank in model.ranks}

    def where(self, models: Iterable[PlacedModel]) -> str:
        """Return the devices of ``models``: ``actor, critic on 8 A100-80G; ref on 4 V100-32G``."""
        names: dict[str, list[str]] = {}
        for model in models:
            place = f"{len(model.ranks)} {' and '.join(sorted(self.classes_of(model)))}"
            names.setdefault(place, []).append(model.name)
        return "; ".join(f"{', '.join(each)} on {place}" for place, each in names.items())


@dataclass(frozen=True)
class GuidelineRule:
    """A published rule.

    name:      the rule in a few words.
    source:    the system that publishes it.
    judge:     judges a plan by it.
    strategy:  the strategy that it leads to; empty: to none in particular.
    """

    name: str
    source: str
    judge: Callable[[JudgedPlan], Judgement]
    strategy: str = ""


@dataclass(frozen=True)
class RuleVerdict:
    """A rule, judged on a plan.

    rule:      the rule.
    state:     whether the plan follows it.
    evidence:  figures of the plan.
    """

    rule: GuidelineRule
    state: RuleState
    evidence: str


def judged(simulation: Simulation, cluster: Cluster | None = None) -> tuple[RuleVerdict, ...]:
    """Judge a plan by every rule. ``cluster``: its devices with all their memory; None: as the plan has them."""
    states: dict[bool | None, RuleState] = {True: "followed", False: "contradicted", None: "not applicable"}
    item = JudgedPlan(simulation, cluster or simulation.plan.cluster)
    found = ((rule, rule.judge(item)) for rule in RULES)
    return tuple(RuleVerdict(rule, states[follows], evidence) for rule, (follows, evidence) in found)


# --- sizes, of a plan and of a request


@dataclass(frozen=True)
class MemorySizes:
    """Bytes of models and devices.

    smallest_device:  bytes of the device with least memory.
    weights:          role → bytes of its weights.
    static_share:     share of all devices' memory that weights, gradients and optimizers fill when sharded over all.
    """

    smallest_device: float
    weights: Mapping[str, float]
    static_share: float

    @property
    def are_known(self) -> bool:
        return self.smallest_device < UNLIMITED


def memory_sizes(
    spec: Spec, shapes: Mapping[str, ModelShape], trained: Collection[str], cluster: Cluster
) -> MemorySizes:
    """Return the bytes of the models of ``spec`` and of the devices of ``cluster``."""
    first = [cluster.ranks_on_node(node)[0] for node in range(cluster.num_nodes)]
    smallest = float(min(cluster.memory_bytes(rank) or UNLIMITED for rank in first))
    weights, states = {}, 0.0
    for role, shape in shapes.items():
        settings = spec.models.of(role)
        assert settings is not None, f"{role} is resolved"
        weights[role] = float(settings.item_bytes * shape.num_parameters)
        # float32 gradients, master weights and two moments (HybridFlow, section 8.1)
        states += weights[role] + 16.0 * shape.num_trained * (role in trained)
    return MemorySizes(smallest, weights, states / (smallest * len(cluster.devices)))


def fitting_role(sizes: MemorySizes, trained: Collection[str], cluster: Cluster) -> str | None:
    """Return one of several models for inference that fits one node, so that they may share the devices by halves."""
    frozen = [role for role in sizes.weights if role not in trained]
    room = INFERENCE_SHARE * sizes.smallest_device * cluster.most_on_node
    is_split = len(frozen) > 1 and len(cluster.devices) > 1
    return next((role for role in frozen if is_split and sizes.weights[role] <= room), None)


def are_even(phases: Iterable[float]) -> bool:
    """Whether phases take about equally long, so that micro-batches fill a pipeline of them."""
    seconds = [each for each in phases if each]
    return not seconds or max(seconds) <= EVEN * min(seconds)


# --- FlexRLHF


def _interleaves(item: JudgedPlan) -> Judgement:
    plan, sizes = item.plan, item.sizes
    role = fitting_role(sizes, plan.graph.trained, item.cluster)
    if not item.is_small or role is None:
        return None, item.nodes if role else "no two models for inference, or none fits one node"
    node = f" ({bytes_text(int(sizes.smallest_device * item.cluster.most_on_node))})" if sizes.are_known else ""
    reason = f"{role} ({bytes_text(int(sizes.weights[role]))}) fits one node{node} of {item.cluster.num_nodes}"
    return plan.strategy == Strategy.INTERLEAVING, f"{reason}; {plan.strategy}"


def _colocates(item: JudgedPlan) -> Judgement:
    plan, sizes = item.plan, item.sizes
    if not item.is_small or fitting_role(sizes, plan.graph.trained, item.cluster) is not None:
        return None, item.nodes
    full = f", states fill {sizes.static_share:.0%} of their memory when sharded over all" if sizes.are_known else ""
    return plan.strategy == Strategy.COLOCATED, f"{counted(item.devices, 'device')}{full}; {plan.strategy}"


def _disaggregates(item: JudgedPlan) -> Judgement:
    plan = item.plan
    applies = item.cluster.num_nodes > FEW_NODES and len(item.cluster.classes) == 1 and plan.graph.can_shadow
    return plan.strategy == Strategy.DISAGGREGATED if applies else None, f"{item.nodes}; {plan.strategy}"


def _shadow_has_a_share(item: JudgedPlan) -> Judgement:
    plan = item.plan
    shadow = item.shadow_actor
    if shadow is None or len(item.cluster.classes) > 1:
        return None, "no shadow actor" if shadow is None else item.nodes
    share = Fraction(len(shadow.ranks), item.devices)
    others = [
        model.name for model in plan.placement.models if model is not shadow and set(model.ranks) & set(shadow.ranks)
    ]
    with_whom = f"with {', '.join(others)}" if others else "alone"
    has = f"{shadow.name} has {len(shadow.ranks)} of {item.devices} devices ({float(share):.0%})"
    return LEAST_SHADOW <= share <= MOST_SHADOW and not others, f"{has} {with_whom}"


def _replicas_stay_in_nodes(item: JudgedPlan) -> Judgement:
    plan = item.plan
    if item.cluster.num_nodes == 1:
        return None, "1 node"
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run)]
    generating = {run.model for run in runs if run.operator.kind == "generate"}
    for model in plan.placement.models:
        widest = max(len({item.cluster.node_of(rank) for rank in ranks}) for ranks in model.layout.replica_sets)
        if widest > 1:
            return False, f"a replica of {model.name} spans {widest} nodes"
        nodes = len({item.cluster.node_of(rank) for rank in model.ranks})
        if model.name in generating and model.split != "whole" and nodes > 1 and not model.is_sharded_in_nodes:
            return False, f"{model.name} gathers its weights over {nodes} nodes at every token"
    degrees = [(model.layout.dims.tp, model.name) for model in plan.placement.models]
    widest, name = max(degrees)
    return True, f"replicas of at most {item.cluster.most_on_node} devices in a node, tp {widest} of {name} the widest"


def _phases_are_even(item: JudgedPlan) -> Judgement:
    plan, phases = item.plan, item.simulation.part_seconds
    if plan.strategy != Strategy.DISAGGREGATED:
        return None, f"{plan.strategy}: phases take turns on the same devices"
    chunks, lag = plan.batch.num_chunks, plan.schedule.lag
    text = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in phases.items())
    how = f"in {counted(chunks, 'chunk')}{f' and with lag {lag}' if lag else ''}"
    return (chunks > 1 or lag > 0) and are_even(phases.values()), f"{text}, {how}"


def _stops_before_full(item: JudgedPlan) -> Judgement:
    plan = item.plan
    communicators = plan.most_communicators
    limits = [(memory, item.cluster.memory_bytes(memory.rank, communicators)) for memory in plan.memories]
    shares = [(memory.peak_bytes / limit, memory.rank, memory.peak_bytes, limit) for memory, limit in limits if limit]
    if not shares:
        return None, "memory of the devices is unknown"
    share, rank, peak, limit = max(shares, key=lambda each: each[0])
    return share <= FULL, f"{bytes_text(peak)} of {bytes_text(limit)} on rank {rank} ({share:.0%})"


def _older_devices_infer(item: JudgedPlan) -> Judgement:
    plan = item.plan
    if len(item.cluster.classes) == 1:
        return None, "devices of one class"
    strongest, models = item.cluster.classes_by_strength[0], plan.placement.models
    trained = {name for model in models if model.trained for name in item.classes_of(model)}
    frozen = [model for model in models if not model.trained and not model.follows]
    follows = trained == {strongest} and all(strongest not in item.classes_of(model) for model in frozen)
    return follows, f"{item.where([*(model for model in models if model.trained), *frozen])}"


def _shadow_is_on_spare(item: JudgedPlan) -> Judgement:
    plan = item.plan
    if len(item.cluster.classes) == 1 or not plan.graph.can_shadow:
        return None, "devices of one class" if plan.graph.can_shadow else "no shadows"
    shadow, strongest = item.shadow_actor, item.cluster.classes_by_strength[0]
    if shadow is None:
        return False, f"no shadow actor: {plan.graph.generated} generates where it is trained"
    return item.classes_of(shadow) == {strongest}, item.where([shadow])


# --- HybridFlow and ReaL


def _fills_static_memory(item: JudgedPlan) -> Judgement:
    sizes = item.sizes
    if not sizes.are_known:
        return None, "memory of the devices is unknown"
    follows = sizes.static_share >= STATIC_SHARE
    more = "" if follows else ": seconds fall less than the number of devices rises"
    return follows, f"states fill {sizes.static_share:.0%} of memory when sharded over all{more}"


def _is_colocated_on_few(item: JudgedPlan) -> Judgement:
    plan, devices = item.plan, item.devices
    return (
        plan.strategy == Strategy.COLOCATED if devices <= FEW_DEVICES else None,
        f"{counted(devices, 'device')}; {plan.strategy}",
    )


def _is_distributed_on_many(item: JudgedPlan) -> Judgement:
    plan, devices = item.plan, item.devices
    return (
        plan.strategy != Strategy.COLOCATED if devices > FEW_DEVICES else None,
        f"{counted(devices, 'device')}; {plan.strategy}",
    )


def _largest_has_most(item: JudgedPlan) -> Judgement:
    plan, weights = item.plan, item.sizes.weights
    trained = [model for model in plan.placement.models if model.trained and model.role in weights]
    largest = max(trained, key=lambda model: weights[model.role], default=None)
    actor = plan.graph.generated or "actor"
    if largest is None or weights[largest.role] <= LARGER * weights.get(actor, weights[largest.role]):
        return None, "no trained model is larger than the actor"
    devices = ", ".join(f"{model.name} has {len(model.ranks)}" for model in trained)
    follows = all(len(largest.ranks) >= len(model.ranks) for model in trained)
    return follows, f"{largest.name} is the largest; {devices} devices"


FLEXRLHF, HYBRIDFLOW, REAL = "FlexRLHF", "HybridFlow", "ReaL"
INTERLEAVE = GuidelineRule("interleave what fits a node", FLEXRLHF, _interleaves, Strategy.INTERLEAVING)
COLOCATE = GuidelineRule("co-locate where devices are scarce", FLEXRLHF, _colocates, Strategy.COLOCATED)
DISAGGREGATE = GuidelineRule("disaggregate beyond two nodes", FLEXRLHF, _disaggregates, Strategy.DISAGGREGATED)
SHADOW_SHARE = GuidelineRule("30 to 50 % for the shadow actor alone", FLEXRLHF, _shadow_has_a_share)
IN_NODES = GuidelineRule("replicas inside nodes", FLEXRLHF, _replicas_stay_in_nodes)
EVEN_PHASES = GuidelineRule("even phases in pipelined chunks", FLEXRLHF, _phases_are_even)
STOP_BEFORE_FULL = GuidelineRule(f"stop before {FULL:.0%} of memory", FLEXRLHF, _stops_before_full)
OLDER_INFER = GuidelineRule("older devices infer", FLEXRLHF, _older_devices_infer)
SPARE_SHADOW = GuidelineRule("shadow actor on spare newer devices", FLEXRLHF, _shadow_is_on_spare)
RULES = (
    DISAGGREGATE,
    INTERLEAVE,
    COLOCATE,
    OLDER_INFER,
    SPARE_SHADOW,
    SHADOW_SHARE,
    IN_NODES,
    EVEN_PHASES,
    STOP_BEFORE_FULL,
    GuidelineRule("co-locate small clusters", HYBRIDFLOW, _is_colocated_on_few, Strategy.COLOCATED),
    GuidelineRule("distribute on large clusters", HYBRIDFLOW, _is_distributed_on_many),
    GuidelineRule("devices by size of the trained models", HYBRIDFLOW, _largest_has_most),
    GuidelineRule("static memory of 60 %", REAL, _fills_static_memory),
)
"""All rules, those of FlexRLHF's guideline first."""
