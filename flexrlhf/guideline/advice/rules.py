"""The published rules for where models go, each named when it fires.

FlexRLHF's guideline decides (strategy, shares, settings); HybridFlow (Sheng et al., EuroSys 2025, section 8.3) and ReaL
(Mei et al., MLSys 2025, section 8) comment on the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from flexrlhf.config.spec import ModelSpec
from flexrlhf.guideline.advice.choices import Member
from flexrlhf.guideline.advice.proposals import Allowed, Vector, in_chunks, settle, vector_ranks
from flexrlhf.guideline.advice.space import UNLIMITED, USABLE, Space
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment
from flexrlhf.text import bytes_text
from flexrlhf.weights.shapes import DTYPE_BYTES, count_elements

FEW_NODES = 2
LEAST_SHADOW, MOST_SHADOW = Fraction(3, 10), Fraction(1, 2)
STATIC_SHARE = 0.6
INFERENCE_SHARE = 0.5
"""Of a node's memory that a model for inference may fill: the rest is for what it computes with."""


@dataclass(frozen=True)
class Rule:
    """``name`` and ``source`` of a rule that fired, and what made it fire."""

    name: str
    source: str
    reason: str


@dataclass(frozen=True)
class Ruling:
    """What the rules say. ``assignment``: None where nothing that they allow fits."""

    strategy: str
    space: Space
    vector: Vector
    rules: tuple[Rule, ...]
    assignment: Assignment | None


@dataclass(frozen=True)
class Facts:
    """Bytes of the models of a spec and of a cluster's devices."""

    nodes: int
    devices: int
    smallest_device: float
    smallest_node: float
    weights: Mapping[str, float]
    states: Mapping[str, float]

    @property
    def static_share(self) -> float:
        """Of all devices' memory, what weights, gradients and optimizers fill when sharded over all."""
        return sum(self.states.values()) / (self.smallest_device * self.devices)


def facts_of(space: Space) -> Facts:
    memory = [space.pool.memory[kind] / USABLE for kind in space.pool.nodes]
    weights, states = {}, {}
    for role in space.roles.all:
        settings, shape = space.spec.models.of(role), space.shapes[role]
        assert settings is not None, f"{role} is resolved"
        item, trained = DTYPE_BYTES[settings.dtype], count_elements(shape.trained)
        weights[role] = float(item * shape.num_parameters)
        # float32 gradients, master weights and two moments (HybridFlow, section 8.1)
        states[role] = weights[role] + 16.0 * trained * (role in space.roles.trained)
    per_node = space.pool.per_node
    return Facts(space.cluster.num_nodes, space.pool.num_devices, min(memory), min(memory) * per_node, weights, states)


def guideline(plain: Space, shadowed: Space | None) -> Ruling:
    """``plain``: the space without shadows, ``shadowed``: the one with them, where the algorithm has shadows."""
    facts = facts_of(plain)
    if len(plain.devices) > 1:
        found = _by_class(plain)
    elif shadowed is not None and facts.nodes > FEW_NODES:
        found = _disaggregated(shadowed, facts)
    elif (rule := _fits_a_node(plain, facts)) is not None and plain.pool.num_devices > 1:
        found = _interleaved(plain, rule)
    else:
        found = _colocated(plain, facts)
    return _with_comments(found, facts)


def _fits_a_node(space: Space, facts: Facts) -> Rule | None:
    """Whether a model that is not trained fits one node, and half of the devices beside another one on the others."""
    frozen = _frozen(space)
    for role in frozen if len(frozen) > 1 else ():
        if facts.weights[role] <= INFERENCE_SHARE * facts.smallest_node:
            room = f" ({bytes_text(int(facts.smallest_node))})" if facts.smallest_device < UNLIMITED else ""
            reason = f"{role} ({bytes_text(int(facts.weights[role]))}) fits one node{room} of {facts.nodes}"
            return Rule("interleave what fits a node", "FlexRLHF, guideline", reason)
    return None


def _frozen(space: Space) -> tuple[str, ...]:
    return tuple(role for role in space.roles.all if role not in space.roles.trained)


def _by_class(space: Space) -> Ruling:
    """What trains and generates on the fastest class, what only infers on the largest of the others."""
    fastest = max(space.devices, key=lambda name: space.devices[name].tflops)
    others = {name: space.cluster.ranks_on(name) for name in space.devices if name != fastest}
    older = max(others, key=lambda name: len(others[name]))
    homes = {True: space.cluster.ranks_on(fastest), False: others[older]}
    ranks = {role: homes[role in space.roles.trained] for role in space.roles.all}
    reason = f"what trains on {len(homes[True])} {fastest}, what only infers on {len(homes[False])} {older}"
    rules = (Rule("older devices infer", "FlexRLHF, mixed clusters", reason), _batch_rule())
    whole = all(mine[-1] - mine[0] + 1 == len(mine) for mine in homes.values())
    assignment = _settled(space, ranks, _one_node_replicas) or _settled(space, ranks) if whole else None
    return Ruling("interleaving", space, (), rules, assignment)


def _interleaved(space: Space, rule: Rule) -> Ruling:
    half, frozen = Fraction(1, 2), _frozen(space)
    vector = tuple(half if role in frozen else Fraction(1) for role in space.roles.all)
    ranks = vector_ranks(space, vector)
    assignment = None if ranks is None else _settled(space, ranks, _one_node_replicas)
    if assignment is None:
        return _colocated(space, facts_of(space))
    return Ruling("interleaving", space, vector, (rule, _batch_rule()), assignment)


def _colocated(space: Space, facts: Facts) -> Ruling:
    vector = tuple(Fraction(1) for _ in space.roles.all)
    ranks = vector_ranks(space, vector)
    reason = f"{facts.devices} devices, of whose memory states take {facts.static_share:.0%} when sharded over all"
    rules = (Rule("co-locate where devices are scarce", "FlexRLHF, guideline", reason), _batch_rule())
    assignment = None if ranks is None else _settled(space, ranks, _one_node_replicas)
    return Ruling("co-located", space, vector, rules, assignment or _anyhow(space, ranks))


def _settled(space: Space, ranks: Mapping[str, tuple[int, ...]], allowed: Allowed | None = None) -> Assignment | None:
    found = settle(space, ranks, allowed)
    return None if isinstance(found, str) else found


def _anyhow(space: Space, ranks: Mapping[str, tuple[int, ...]] | None) -> Assignment | None:
    return None if ranks is None else _settled(space, ranks)


def _disaggregated(space: Space, facts: Facts) -> Ruling:
    """The shares of 30 to 50 % for the shadow actor under which a step is shortest."""
    found: list[tuple[float, Vector, Assignment]] = []
    problem = space.problem()
    for vector in _shadow_vectors(space):
        ranks = vector_ranks(space, vector)
        assignment = None if ranks is None else _settled(space, ranks, _one_node_replicas)
        if assignment is not None:
            found.append((evaluate(problem, assignment), vector, assignment))
    rules = [Rule("disaggregate beyond two nodes", "FlexRLHF, guideline", f"{facts.nodes} nodes")]
    if not found:
        return Ruling("disaggregated", space, (), tuple(rules), None)
    _, vector, assignment = min(found, key=lambda item: item[:2])
    _, space, assignment = in_chunks(space, [assignment])
    share = float(vector[0])
    rules += [
        Rule("a shadow actor of 30 to 50 %", "FlexRLHF, guideline", f"it has {share:.0%} of {facts.devices} devices"),
        Rule("a replica per node, not across", "FlexRLHF, guideline", "the shadow's replicas stay inside nodes"),
        Rule("even out the phases", "FlexRLHF, guideline", _phases(space, assignment)),
        _batch_rule(),
    ]
    return Ruling("disaggregated", space, vector, tuple(rules), assignment)


def _shadow_vectors(space: Space) -> Iterator[Vector]:
    """Whole nodes (eighths of a small cluster, sixteenths of a large one) for the shadow actor and for training; the
    rest infers."""
    total, node = space.pool.num_devices, space.pool.per_node
    unit = max(1, min(node, total // 8), total // 16 // node * node)
    for shadow in range(unit, total, unit):
        if LEAST_SHADOW <= Fraction(shadow, total) <= MOST_SHADOW:
            for training in range(unit, total - shadow + 1, unit):
                rest = total - training - shadow
                if rest > 0 or training + shadow == total:
                    yield _vector(space, shadow, training, rest or shadow, total)


def _vector(space: Space, shadow: int, training: int, rest: int, total: int) -> Vector:
    sizes = [shadow if role == space.roles.trained[0] else rest for role in space.roles.trained]
    sizes += [training if role in space.roles.trained else rest for role in space.roles.all]
    return tuple(Fraction(size, total) for size in sizes)


def _phases(space: Space, assignment: Assignment) -> str:
    """Seconds of the longest model in each phase."""
    longest = {"generate": 0.0, "forward": 0.0, "train": 0.0}
    for member, choice in zip(space.members, assignment, strict=True):
        for phase in longest:
            calls = zip(member.calls, choice.option.seconds, strict=True)
            longest[phase] = max(longest[phase], sum(seconds for call, seconds in calls if call.kind == phase))
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in longest.items())


def _batch_rule() -> Rule:
    return Rule("fill memory to 95 %", "FlexRLHF, guideline", "micro-batches as large as pay within it")


def _one_node_replicas(member: Member, settings: ModelSpec) -> bool:
    """A copy that generates is whole inside a node: no weights cross the network at every token."""
    return "generate" not in member.kinds or member.trained or settings.zero == 0


def _with_comments(ruling: Ruling, facts: Facts) -> Ruling:
    comments = []
    if facts.static_share < STATIC_SHARE:
        reason = (
            f"states fill {facts.static_share:.0%} of memory: with more devices seconds fall less than devices rise"
        )
        comments.append(Rule("static memory under 60 %", "ReaL, section 8", reason))
    if facts.devices <= 64:
        reason = f"{facts.devices} devices: models that share all of them leave fewest idle"
        comments.append(Rule("co-locate small clusters", "HybridFlow, section 8.3", reason))
    else:
        reason = f"{facts.devices} devices: a batch cut so finely no longer fills them, so stages go side by side"
        comments.append(Rule("distribute on large clusters", "HybridFlow, section 8.3", reason))
    trained = ruling.space.roles.trained
    larger = max(trained, key=lambda role: facts.weights[role])
    if facts.weights[larger] > 1.5 * facts.weights.get("actor", facts.weights[larger]):
        reason = f"{larger} is the largest: it gets the most devices, so that trainings end together"
        comments.append(Rule("devices by size of the trained models", "HybridFlow, section 8.3", reason))
    return Ruling(ruling.strategy, ruling.space, ruling.vector, (*ruling.rules, *comments), ruling.assignment)
