"""Simulations of a run with one thing changed: types and decoding of the rollout, links, devices, times of scores.

Some changes are settings or descriptions of a run; the others are changes of the cost model that no run can have yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from flexrlhf.errors import UserError
from flexrlhf.guideline.costs.cost_model import Call, Cost, CostModel, Links, Mesh, Traffic, transformer_of
from flexrlhf.guideline.costs.environment_times import EnvironmentTimes
from flexrlhf.guideline.simulation.inputs import TextLengths
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.guideline.simulation.what_if_changes import Change, eight_bit_share, read_changes
from flexrlhf.memory.budget import Sizing
from flexrlhf.memory.states import State, item_bytes
from flexrlhf.placement.devices import DeviceClass
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.routes import Primitive
from flexrlhf.plan.cache_size import unsized_spec
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

    def environment(self, name: str) -> EnvironmentTimes | None:
        return self.costs.environment(name)


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


def what_if(plan: Plan, costs: CostModel, lengths: TextLengths, names: Sequence[str]) -> list[Outcome]:
    """Return the run as planned, then with each change. Raises UserError for names that are no change."""
    wanted = [each for name in names for each in (DEFAULTS if name == DEFAULT else (name,))]
    changes = [(name, read_changes(name)) for name in dict.fromkeys(wanted)]
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
    spec = planned = unsized_spec(plan)
    for each in changes:
        spec = each.spec(spec)
        costs = ChangedCosts(costs, each.call)
    plan = plan if spec is planned else make_plan(spec)
    memories = plan.memories
    eight = frozenset(name for each in changes for name in each.eight)
    if eight:
        inputs = {each.name: getattr(plan.sizing, each.name) for each in fields(Sizing)}
        # copies of fewer bits contain no weights of another type
        memories = plan.memories_by(EightBitSizing(**inputs | {"reusing": {}}, eight=eight))
    fullest = max(memories, key=lambda each: each.peak_bytes - (plan.device_bytes(each.rank) or 0))
    note = "; ".join(each.note for each in changes)
    simulation = simulate(plan, costs, lengths)
    return Outcome(name, note, simulation, fullest.peak_bytes, plan.device_bytes(fullest.rank))
