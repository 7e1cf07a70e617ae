"""Time of one PPO or GRPO step in the systems of the field.

A ``System`` names its engines, how weights come to generation, and the placements that it chooses among. ``steps_of``
lays a ``Workload`` out in each of them: meshes that fit, micro-batches from the remaining memory, and the step's time
from a walk of its calls over groups of devices: calls that share a device run in turn, others in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.systems.calls import SystemCall, call_seconds, calls_of, transition_seconds
from benchmarks.systems.engines import TABLES
from benchmarks.systems.footprint import capacity_bytes, frozen_bytes
from benchmarks.systems.memory import MemoryUse, fitted, has_host_memory, memory_use, most_rows, peak_bytes, sized
from benchmarks.systems.meshes import ModelMeshes, mesh_candidates, mesh_of, splits, state_bytes
from benchmarks.systems.profiles import System
from benchmarks.systems.workload import ACTOR, ROLLOUT, SystemPlacement, Workload, placements_of
from flexrlhf.guideline.costs.cost_model import CostModel, Mesh
from flexrlhf.guideline.simulation.walk import TimedInstruction, steady_seconds, walk_steps

ROOMY = 0.75
"""Fraction of a device that states may take before a user turns to the next ZeRO stage, and at last to offloading."""


@dataclass(frozen=True)
class SystemStep:
    """One step of a system.

    placement:     groups of devices, and the models on each
    calls:         calls on their meshes
    rows:          rows of the step
    seconds:       duration
    call_seconds:  duration by name of a call, or ``transition``
    bytes:         peak memory of a device of each group
    """

    placement: SystemPlacement
    calls: tuple[SystemCall, ...]
    rows: int
    seconds: float
    call_seconds: Mapping[str, float]
    bytes: tuple[float, ...] = ()

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds


def steps_of(
    workload: Workload, system: System, costs: CostModel | None = None, placement: SystemPlacement | None = None
) -> list[SystemStep]:
    """Return every way of ``system`` to run ``workload`` that fits, the fastest first; on ``placement`` if given."""
    costs = costs or TABLES.costs(system.overheads)
    own = (each for name in system.placements for each in placements_of(name, workload))
    placements = (placement,) if placement is not None else own
    steps = [step for each in placements for step in _steps_on(workload, system, each, costs)]
    return sorted(steps, key=lambda step: -step.rows_per_second)


def best_step(
    workload: Workload, system: System, costs: CostModel | None = None, placement: SystemPlacement | None = None
) -> SystemStep | None:
    """Return the fastest step; None if none fits."""
    return next(iter(steps_of(workload, system, costs, placement)), None)


def _steps_on(workload: Workload, system: System, placement: SystemPlacement, costs: CostModel) -> Iterator[SystemStep]:
    """Yield the steps on every layout; a system that prefers the smallest takes the first that fits, with any mesh of
    generation."""
    if system.layout == "searched":
        searched = _searched(workload, system, placement, costs)
        yield from () if searched is None else (searched,)
        return
    taken: Mapping[str, Mesh] | None = None
    for meshes in mesh_candidates(workload, system, placement):
        if taken is not None and meshes.models != taken:
            return
        step = _step(workload, system, placement, meshes, costs)
        if step is not None:
            taken = meshes.models
            yield step


def _step(
    workload: Workload, system: System, placement: SystemPlacement, meshes: ModelMeshes, costs: CostModel
) -> SystemStep | None:
    """Return the step on ``meshes``; None if it does not fit."""
    usage = memory_use(workload, system, placement, meshes)
    is_last = meshes.models[ACTOR].zero == 3 and (meshes.offload or system.offloads == "no")
    if system.layout == "ZeRO" and not is_last and max(usage.most) > ROOMY * capacity_bytes(workload.device):
        return None
    rows = workload.rows or 4096 * workload.devices
    if meshes.offload and not has_host_memory(workload):
        return None
    if system.layout == "ZeRO" and rows < workload.minibatches * meshes.models[ACTOR].dp:
        return None  # a replica without a row of a mini-batch
    calls = fitted(workload, system, placement, meshes, usage, rows)
    if calls is None:
        return None
    if workload.rows is None:
        rows = most_rows(workload, system, placement, calls, usage)
        if not rows:
            return None
        calls = fitted(replace(workload, rows=rows), system, placement, meshes, usage, rows)
    assert calls is not None, "if many rows fit, fewer do"
    transition = transition_seconds(workload, system, placement, meshes.models[ACTOR], meshes.generate, costs)
    seconds, by_name = _walked(system, placement, calls, transition, costs)
    return SystemStep(placement, calls, rows, seconds, by_name, peak_bytes(system, placement, calls, usage))


def timed_as(step: SystemStep, system: System, costs: CostModel | None = None) -> SystemStep:
    """Return ``step`` with the durations of another system on the same meshes."""
    calls = tuple(_generated_by(placed, system.generator) for placed in step.calls)
    transition = step.call_seconds.get("transition", 0.0)
    seconds, by_name = _walked(system, step.placement, calls, transition, costs or TABLES.costs(system.overheads))
    return replace(step, calls=calls, seconds=seconds, call_seconds=by_name)


def _generated_by(placed: SystemCall, generator: str) -> SystemCall:
    if placed.call.kind != "generate":
        return placed
    return replace(placed, call=replace(placed.call, engine=generator))


def part_seconds(step: SystemStep, kinds: tuple[str, ...]) -> float:
    """Return the time of calls of some kinds, in parallel if their groups of devices differ."""
    calls = [placed for placed in step.calls if placed.call.kind in kinds]
    order = {placed.name: index for index, placed in enumerate(calls)}
    timed = [
        TimedInstruction(
            placed.blocks,
            step.call_seconds[placed.name],
            tuple(order[name] for name in placed.after if name in order),
        )
        for placed in calls
    ]
    return on_policy_seconds(timed, step.placement)


def _walked(
    system: System, placement: SystemPlacement, calls: Sequence[SystemCall], transition: float, costs: CostModel
) -> tuple[float, dict[str, float]]:
    """Return the time of a step, and of each call by name."""
    seconds = {placed.name: system.controller_seconds + call_seconds(placed, costs) for placed in calls}
    order = {placed.name: index for index, placed in enumerate(calls)}
    timed = [
        TimedInstruction(
            placed.blocks,
            seconds[placed.name],
            tuple(order[name] for name in placed.after),
            lag=int(system.ahead and placed.call.kind != "generate"),
        )
        for placed in calls
    ]
    if transition:
        blocks = {*placement.groups[ACTOR], *placement.groups.get(ROLLOUT, ())}
        timed.append(TimedInstruction(tuple(sorted(blocks)), transition, (len(calls) - 1,), lag=int(system.ahead)))
        seconds["transition"] = transition
    total = steady_seconds(timed, len(placement.blocks)) if system.ahead else on_policy_seconds(timed, placement)
    return total, seconds


def on_policy_seconds(timed: list[TimedInstruction], placement: SystemPlacement) -> float:
    """Return the time of a step that ends before the next one begins, as in every on-policy system."""
    return walk_steps(timed, len(placement.blocks), 1).ends[0]


BUDGETS = (0.1, 0.2, 0.3, 0.5)
"""Shares of a device that the state of one trained model may take: tried one after the other."""


def _searched(workload: Workload, system: System, placement: SystemPlacement, costs: CostModel) -> SystemStep | None:
    """Return the fastest of several searches, each with another fraction of the memory for states."""
    steps = (_searched_within(workload, system, placement, costs, budget) for budget in BUDGETS)
    return min((step for step in steps if step is not None), key=lambda step: step.seconds, default=None)


def _searched_within(
    workload: Workload, system: System, placement: SystemPlacement, costs: CostModel, budget: float
) -> SystemStep | None:
    """Choose meshes of trained models first; then every other call takes its fastest mesh that fits. Weights that are
    only read are in host memory while others work."""
    rows = workload.rows or 64 * workload.devices
    states = [0.0] * len(placement.blocks)
    chosen: dict[str, SystemCall] = {}
    for placed in _by_weight(_drafts(workload, system, placement, rows)):
        best = _fastest(workload, system, placement, placed, tuple(states), costs, budget)
        if best is None:
            return None
        chosen[placed.name] = best
        for block in best.blocks if best.call.kind == "train" else ():
            states[block] += state_bytes(workload, system, placed.role, best.mesh, False)
    calls = tuple(chosen[placed.name] for placed in _drafts(workload, system, placement, rows))
    trained = next(placed.mesh for placed in calls if placed.call.kind == "train" and placed.role == ACTOR)
    transition = transition_seconds(workload, system, placement, trained, calls[0].mesh, costs)
    seconds, by_name = _walked(system, placement, calls, transition, costs)
    return SystemStep(placement, calls, rows, seconds, by_name, peak_bytes(system, placement, calls, _states(states)))


def _drafts(workload: Workload, system: System, placement: SystemPlacement, rows: int) -> tuple[SystemCall, ...]:
    """Return the calls before meshes are chosen: replicas alone."""
    replicas = {role: mesh_of(workload, placement.devices(role), zero=1) for role in workload.models}
    home = placement.groups.get(ROLLOUT, placement.groups[ACTOR])
    size = sum(placement.blocks[block] for block in home)
    return tuple(calls_of(workload, system, placement, ModelMeshes(replicas, mesh_of(workload, size)), rows))


def _by_weight(calls: tuple[SystemCall, ...]) -> list[SystemCall]:
    """Return ``calls`` in the order in which meshes are chosen: states that stay first, largest models first."""
    order = {"train": 0, "forward": 1, "generate": 2}
    return sorted(calls, key=lambda placed: (order[placed.call.kind], -placed.call.model.parameters))


def _states(states: list[float]) -> MemoryUse:
    return MemoryUse(tuple(states), (0.0,) * len(states), sleeps=False)


def _fastest(
    workload: Workload,
    system: System,
    placement: SystemPlacement,
    placed: SystemCall,
    states: tuple[float, ...],
    costs: CostModel,
    budget: float,
) -> SystemCall | None:
    """Return ``placed`` on its fastest mesh that fits next to ``states``; None if none does."""
    size = sum(placement.blocks[block] for block in placed.blocks)
    others = max(states[block] for block in placed.blocks)
    options = []
    for mesh in splits(workload, size, "searched", placed.call.model.layers):
        state = _own_state(workload, system, placed, mesh)
        if placed.call.kind == "train" and state > budget * capacity_bytes(workload.device):
            continue
        rows = max(1, -(-placed.call.rows * placed.mesh.dp // mesh.dp))
        option = replace(placed, mesh=mesh, call=replace(placed.call, rows=rows))
        fitting = sized(workload, system, placement, option, _states([others + state] * len(placement.blocks)))
        if fitting is not None:
            options.append(fitting)
    return min(options, key=lambda option: call_seconds(option, costs), default=None)


def _own_state(workload: Workload, system: System, placed: SystemCall, mesh: Mesh) -> float:
    """Return the bytes that the call's model adds to a device: its state, or a copy of its weights during the call."""
    if placed.call.kind == "generate":
        return 0.0  # counted as the call's own
    if placed.call.kind == "train":
        return state_bytes(workload, system, placed.role, mesh, False)
    return frozen_bytes(placed.call.model, mesh)
