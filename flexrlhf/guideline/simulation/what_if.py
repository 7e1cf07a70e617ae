"""Simulations of a run with one thing changed: types and decoding of the rollout, links, devices, times of scores.

Some changes are settings or descriptions of a run; the others are changes of the cost model that no run can have yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import get_args

from flexrlhf.config.model_settings import Dtype
from flexrlhf.config.placement_settings import NodeSpec
from flexrlhf.config.reward_sources import ModelSource, RewardSource
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError, either, nearest
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Links, Mesh, Traffic, Transformer, transformer_of
from flexrlhf.guideline.costs.speculation import Speculation
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.pricing import UNKNOWN
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.memory.budget import Sizing
from flexrlhf.memory.states import State, item_bytes
from flexrlhf.placement.devices import GPUS_PER_NODE, DeviceClass
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.routes import Primitive
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

DEFAULT = "default"
"""Stands for the changes of ``DEFAULTS`` that the run can have."""
DEFAULTS = (
    "rollout=bfloat16",
    "rollout=fp8",
    "cache=fp8",
    "speculative=0.7",
    "network=0.5x",
    "network=2x",
    "devices=2x",
    "reward=2s",
)
EIGHT_BIT = "fp8"
NO_SETTING = "not a setting of a run"


@dataclass(frozen=True)
class Change:
    """A change of a run.

    note:   what it is, with its assumptions
    spec:   changed settings
    call:   changed calls of generation
    eight:  tensors of the rollout engine in eight bits, ``weights`` or ``cache``
    """

    note: str
    spec: Callable[[Spec], Spec] = field(default=lambda spec: spec)
    call: Callable[[Call], Call] = field(default=lambda call: call)
    eight: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """A simulated run.

    name:        of the change, as written
    note:        what it is; why it has no plan
    simulation:  of the run; None: it has no plan
    peak:        bytes on the fullest device
    memory:      bytes of that device; None if they are unknown
    """

    name: str
    note: str
    simulation: Simulation | None = None
    peak: int = 0
    memory: int | None = None


@dataclass(frozen=True)
class ChangedCosts:
    """CostModel in which calls of generation are changed."""

    costs: CostModel
    change: Callable[[Call], Call]

    def call(self, call: Call, mesh: Mesh) -> Cost:
        return self.costs.call(self.change(call) if call.kind == "generate" else call, mesh)

    def combine(self, rows: int, width: float) -> Cost:
        return self.costs.combine(rows, width)

    def move(self, primitive: Primitive, traffic: Traffic, links: Links) -> Cost:
        return self.costs.move(primitive, traffic, links)

    def sync(self, traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
        return self.costs.sync(traffic, gathered, num_tensors, links)

    def switch(self, size: int, device: DeviceClass) -> Cost:
        return self.costs.switch(size, device)

    def save(self, size: int) -> Cost:
        return self.costs.save(size)


@dataclass(frozen=True)
class EightBitSizing(Sizing):
    """Bytes of a plan whose rollout engine has matrices of layers, or its cache, in eight bits.

    eight:  as of ``Change``
    """

    eight: frozenset[str] = frozenset()

    def state(self, model: PlacedModel, rank: int) -> State | None:
        state, shape = super().state(model, rank), self.shapes.get(model.role)
        if state is None or model.rollout is None or shape is None or shape.sizes is None:
            return state
        item = item_bytes(model)
        share = eight_bit_share(transformer_of(shape, model.head, False), item) if "weights" in self.eight else 1
        cache = state.cache // item if "cache" in self.eight else state.cache
        return replace(state, weights=int(share * state.weights), cache=cache)


def eight_bit_share(model: Transformer, item: int) -> float:
    """Return the bytes of a model whose matrices of layers have one byte a number, as a share of ``item`` for each."""
    return 1 - (1 - 1 / item) * model.layers * model.matrix_parameters / model.parameters


def what_if(plan: Plan, costs: CostModel, lengths: TextLengths, names: Sequence[str]) -> list[Outcome]:
    """Return the run as planned, then with each change. Raises UserError for names that are no change."""
    wanted = [each for name in names for each in (DEFAULTS if name == DEFAULT else (name,))]
    changes = [(name, [read_change(part) for part in name.split(",")]) for name in dict.fromkeys(wanted)]
    outcomes = [_outcome("as planned", plan, costs, lengths, [])]
    for name, makers in changes:
        try:
            made = [make(plan) for make in makers]
            outcomes.append(_outcome(name, plan, costs, lengths, made))
        except UserError as error:
            if name in names:
                outcomes.append(Outcome(name, str(error)))
    return outcomes


def _outcome(name: str, plan: Plan, costs: CostModel, lengths: TextLengths, changes: Sequence[Change]) -> Outcome:
    spec = plan.spec
    for each in changes:
        spec = each.spec(spec)
        costs = ChangedCosts(costs, each.call)
    plan = plan if spec is plan.spec else make_plan(spec)
    memories = plan.memories
    eight = frozenset(name for each in changes for name in each.eight)
    if eight:
        inputs = {each.name: getattr(plan.sizing, each.name) for each in fields(Sizing)}
        memories = plan.memories_by(EightBitSizing(**inputs, eight=eight))
    fullest = max(memories, key=lambda each: each.peak_bytes - (plan.device_bytes(each.rank) or 0))
    note = "; ".join(each.note for each in changes)
    simulation = simulate(plan, costs, lengths)
    return Outcome(name, note, simulation, fullest.peak_bytes, plan.device_bytes(fullest.rank))


def read_change(text: str) -> Callable[[Plan], Change]:
    """Return the maker of the change ``KEY=VALUE``. Raises UserError for another text."""
    key, equals, value = text.partition("=")
    if not equals or key not in CHANGES:
        found = f"{nearest(key, CHANGES)}; " if equals else ""
        raise UserError(f"--what-if {text}: {found}expected one of {', '.join(f'{each}=...' for each in CHANGES)}")
    return CHANGES[key](value, text)


def _rollout(value: str, text: str) -> Callable[[Plan], Change]:
    if value not in (EIGHT_BIT, *get_args(Dtype)):
        raise UserError(f"--what-if {text}: expected {either((EIGHT_BIT, *get_args(Dtype)))} after rollout=")
    return lambda plan: _rollout_type(value, plan)


def _rollout_type(value: str, plan: Plan) -> Change:
    rollout, role = plan.spec.rollout, _generated(plan)
    if not rollout.has_copy:
        raise UserError("generation uses the weights that are trained; rollout.engine vllm has a copy of them")
    current = rollout.dtype or plan.model(role).dtype
    if value == current:
        raise UserError(f"the rollout has {value} as planned")
    if value != EIGHT_BIT:
        changed = rollout.model_copy(update={"dtype": value})
        note = f"rollout.dtype: {value}"
        return Change(note, spec=lambda spec: spec.model_copy(update={"rollout": changed}))
    note = (
        f"{NO_SETTING}; matrices of layers are stored and read in one byte a number, embeddings, head, cache and syncs "
        f"as planned; products at the 16-bit rate, since device classes have no other"
    )
    return Change(
        note,
        call=lambda call: replace(call, weight_share=eight_bit_share(call.model, call.item)),
        eight=frozenset(("weights",)),
    )


def _cache(value: str, text: str) -> Callable[[Plan], Change]:
    if value != EIGHT_BIT:
        raise UserError(f"--what-if {text}: expected cache={EIGHT_BIT}")

    def change(plan: Plan) -> Change:
        if plan.spec.rollout.engine != "vllm":
            raise UserError(f"rollout.engine {plan.spec.rollout.engine} has no cache of another type; vllm has")
        note = (
            "rollout.config: {kv_cache_dtype: fp8}, which other predictions do not count; keys and values are stored "
            "and read in one byte a number, of as many tokens as planned"
        )
        return Change(note, call=lambda call: replace(call, cache_item=1), eight=frozenset(("cache",)))

    return change


def _generated(plan: Plan) -> str:
    if plan.graph.generated is None:
        raise UserError(f"{plan.spec.algorithm.name} generates nothing")
    return plan.graph.generated


def _speculative(value: str, text: str) -> Callable[[Plan], Change]:
    try:
        acceptance, *others = map(float, value.split(":"))
        drafted, cost = (*others, *(4.0, 0.05)[len(others) :])
    except ValueError:
        raise UserError(
            f"--what-if {text}: expected speculative=ACCEPTANCE[:TOKENS[:COST]], such as speculative=0.7:4:0.05"
        ) from None
    if not (0 <= acceptance <= 1 and drafted >= 1 and drafted == int(drafted) and cost >= 0):
        raise UserError(
            f"--what-if {text}: expected an acceptance rate from 0 to 1, a whole number of drafted tokens and a cost "
            f"of at least 0, such as speculative=0.7:4:0.05"
        )
    speculation = Speculation(acceptance, int(drafted), cost)
    note = (
        f"{NO_SETTING}; {drafted:g} drafted tokens, each accepted with probability {acceptance:g}: "
        f"{speculation.tokens:.3g} tokens a verification, (1 - a^(k+1)) / (1 - a) (Leviathan et al., 2023); drafting "
        f"one takes {cost:g} of a decoding step, the draft's memory is not counted"
    )

    def change(plan: Plan) -> Change:
        _generated(plan)
        return Change(note, call=lambda call: replace(call, speculation=speculation))

    return change


def _links(value: str, text: str, setting: str, figure: str) -> Callable[[Plan], Change]:
    factor, number = _number(value, text, "in GB/s, or a factor such as 2x")

    def change(plan: Plan) -> Change:
        nodes = plan.spec.cluster.nodes
        if not nodes:
            raise UserError("cluster.nodes is not written, whose links it would change")
        if setting == "network_gb_s" and plan.cluster.num_nodes == 1:
            raise UserError("all devices are in one node, whose network no step uses")
        known = [plan.cluster.figures_or(rank, UNKNOWN) for rank in _first_ranks(plan)]
        speeds = [number * getattr(each, figure) if factor else number for each in known]
        changed = tuple(node.model_copy(update={setting: speed}) for node, speed in zip(nodes, speeds, strict=True))
        shown = ", ".join(f"{speed:g}" for speed in dict.fromkeys(speeds))
        return Change(f"other hardware; cluster.nodes, {setting}: {shown}", spec=lambda spec: _on(spec, changed))

    return change


def _first_ranks(plan: Plan) -> Iterator[int]:
    """Yield the first rank of each group of nodes."""
    rank = 0
    for node in plan.spec.cluster.nodes:
        yield rank
        rank += node.count * node.devices


def _on(spec: Spec, nodes: Sequence[NodeSpec]) -> Spec:
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"nodes": tuple(nodes), "devices": None})})


def _devices(value: str, text: str) -> Callable[[Plan], Change]:
    found = re.fullmatch(r"(\d{1,4})x", value)
    if found is None or int(found[1]) < 1:
        raise UserError(f"--what-if {text}: expected a whole factor such as devices=2x")
    times = int(found[1])

    def change(plan: Plan) -> Change:
        cluster = plan.spec.cluster
        if not cluster.nodes:
            more = cluster.model_copy(update={"devices": times * cluster.num_devices})
            return Change(f"--devices {more.devices}", spec=lambda spec: spec.model_copy(update={"cluster": more}))
        nodes = [_more(node, times) for node in cluster.nodes]
        total = sum(node.count * node.devices for node in nodes)
        return Change(f"cluster.nodes with {total} devices, settings as planned", spec=lambda spec: _on(spec, nodes))

    return change


def _more(node: NodeSpec, times: int) -> NodeSpec:
    """Return a node's group with more devices: in the node while it has room, else in more nodes."""
    if node.count == 1 and node.devices * times <= GPUS_PER_NODE:
        return node.model_copy(update={"devices": node.devices * times})
    return node.model_copy(update={"count": node.count * times})


def _reward(value: str, text: str) -> Callable[[Plan], Change]:
    _, seconds = _number(value.removesuffix("s"), text, "in seconds, such as reward=2s")

    def change(plan: Plan) -> Change:
        sections = {name: getattr(plan.spec, name) for name in ("reward", "cost")}
        called = {
            name: value for name, value in sections.items() if any(not isinstance(v, ModelSource) for v in value or ())
        }
        if not called:
            raise UserError("scores come from models alone, not from a service, function or rule")
        update = {name: tuple(_slower(source, seconds) for source in sources) for name, sources in called.items()}
        note = f"{' and '.join(called)}: {seconds:g} s for a call of each source that is no model (seconds)"
        return Change(note, spec=lambda spec: spec.model_copy(update=update))

    return change


def _slower(source: RewardSource, seconds: float) -> RewardSource:
    return source if isinstance(source, ModelSource) else source.model_copy(update={"seconds": seconds})


def _number(value: str, text: str, expected: str) -> tuple[bool, float]:
    """Return whether ``value`` is a factor, as 2x, and its number. Raises UserError for no number above 0."""
    try:
        number = float(value.removesuffix("x"))
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"--what-if {text}: expected a number above 0 {expected}")
    return value.endswith("x"), number


CHANGES: Mapping[str, Callable[[str, str], Callable[[Plan], Change]]] = {
    "rollout": _rollout,
    "cache": _cache,
    "speculative": _speculative,
    "network": partial(_links, setting="network_gb_s", figure="node_gb_s"),
    "link": partial(_links, setting="link_gb_s", figure="link_gb_s"),
    "devices": _devices,
    "reward": _reward,
}
