"""How the systems of the field place and run the calls of one PPO or GRPO step, and what a step takes.

A ``System`` says which engines work, how weights come to generation, and which placements it chooses among;
``steps_of`` lays a ``Task`` out in each of them: meshes from what fits, micro-batches from what is left, and the step's
time from the walk of its calls over groups of devices: what shares a device is done in turn, the rest side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.systems.calls import Work, transition_seconds, work_seconds, works_of
from benchmarks.systems.engines import COSTS
from benchmarks.systems.memory import Held, fitted, has_host_memory, held_bytes, most_rows, peak_bytes, sized
from benchmarks.systems.meshes import Layouts, layouts_of, mesh_of, splits, state_bytes
from benchmarks.systems.profiles import System
from benchmarks.systems.tasks import ACTOR, ROLLOUT, Placement, Task, placements_of
from flexrlhf.guideline.costs.cost_model import CostModel, Mesh
from flexrlhf.guideline.costs.footprint import capacity_bytes, frozen_bytes
from flexrlhf.guideline.simulation.walk import TimedInstruction, steady_seconds, walk_steps

ROOMY = 0.75
"""Share of a device that states may take before a user turns to the next ZeRO stage."""


@dataclass(frozen=True)
class Step:
    """``calls``: seconds by name of a call or transition. ``bytes``: the most that a device of each group blocking."""

    placement: Placement
    works: tuple[Work, ...]
    rows: int
    seconds: float
    calls: Mapping[str, float]
    bytes: tuple[float, ...] = ()

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds


def steps_of(
    task: Task, system: System, costs: CostModel | None = None, placement: Placement | None = None
) -> list[Step]:
    """Every way of ``system`` to run ``task`` that fits, the fastest first; on ``placement`` where that is known."""
    costs = costs or COSTS
    usual = (found for name in system.placements for found in placements_of(name, task))
    placements = (placement,) if placement is not None else usual
    steps = [step for found in placements for step in _placed_steps(task, system, found, costs)]
    return sorted(steps, key=lambda step: -step.rows_per_second)


def best_step(
    task: Task, system: System, costs: CostModel | None = None, placement: Placement | None = None
) -> Step | None:
    """The fastest; None where none fits."""
    return next(iter(steps_of(task, system, costs, placement)), None)


def _placed_steps(task: Task, system: System, placement: Placement, costs: CostModel) -> Iterator[Step]:
    """With every layout; a system that prefers the smallest takes the first that fits, with any mesh of generation."""
    if system.layout == "searched":
        found = _searched(task, system, placement, costs)
        yield from () if found is None else (found,)
        return
    taken: Mapping[str, Mesh] | None = None
    for layouts in layouts_of(task, system, placement):
        if taken is not None and layouts.models != taken:
            return
        step = _step(task, system, placement, layouts, costs)
        if step is not None:
            taken = layouts.models
            yield step


def _step(task: Task, system: System, placement: Placement, layouts: Layouts, costs: CostModel) -> Step | None:
    """None where it does not fit."""
    held = held_bytes(task, system, placement, layouts)
    if (
        system.layout == "ZeRO"
        and max(held.most) > ROOMY * capacity_bytes(task.device)
        and layouts.models[ACTOR].zero != 3
    ):
        return None
    rows = task.rows or 4096 * task.devices
    if layouts.offload and not has_host_memory(task):
        return None
    if system.layout == "ZeRO" and rows < task.minibatches * layouts.models[ACTOR].dp:
        return None  # a replica without a row of a mini-batch
    works = fitted(task, system, placement, layouts, held, rows)
    if works is None:
        return None
    if task.rows is None:
        rows = most_rows(task, system, placement, works, held)
        if not rows:
            return None
        works = fitted(replace(task, rows=rows), system, placement, layouts, held, rows)
    assert works is not None, "what many rows fit into, fewer do"
    transition = transition_seconds(task, system, placement, layouts.generate, costs)
    seconds, calls = _walked(system, placement, works, transition, costs)
    return Step(placement, works, rows, seconds, calls, peak_bytes(system, placement, works, held))


def timed_as(step: Step, system: System, costs: CostModel) -> Step:
    """The same meshes in another system."""
    seconds, calls = _walked(system, step.placement, step.works, step.calls.get("transition", 0.0), costs)
    return replace(step, seconds=seconds, calls=calls)


def part_seconds(step: Step, kinds: tuple[str, ...]) -> float:
    """Of the calls of some kinds, side by side where their groups of devices differ."""
    works = [work for work in step.works if work.call.kind in kinds]
    order = {work.name: index for index, work in enumerate(works)}
    nodes = [
        TimedInstruction(work.blocks, step.calls[work.name], tuple(order[name] for name in work.after if name in order))
        for work in works
    ]
    return whole_seconds(nodes, step.placement)


def _walked(
    system: System, placement: Placement, works: tuple[Work, ...], transition: float, costs: CostModel
) -> tuple[float, dict[str, float]]:
    """Seconds of a step, and of each of its calls."""
    seconds = {work.name: work_seconds(work, system, costs) for work in works}
    order = {work.name: index for index, work in enumerate(works)}
    nodes = [
        TimedInstruction(
            work.blocks,
            seconds[work.name],
            tuple(order[name] for name in work.after),
            lag=int(system.ahead and work.call.kind != "generate"),
        )
        for work in works
    ]
    if transition:
        blocks = {*placement.where[ACTOR], *placement.where.get(ROLLOUT, ())}
        nodes.append(TimedInstruction(tuple(sorted(blocks)), transition, (len(works) - 1,), lag=int(system.ahead)))
        seconds["transition"] = transition
    total = steady_seconds(nodes, len(placement.blocks)) if system.ahead else whole_seconds(nodes, placement)
    return total / (1 - system.gaps), seconds


def whole_seconds(nodes: list[TimedInstruction], placement: Placement) -> float:
    """Of a step that ends before the next one begins, as every on-policy system runs it."""
    return walk_steps(nodes, len(placement.blocks), 1).ends[0]


BUDGETS = (0.1, 0.2, 0.3, 0.5)
"""Shares of a device that the state of one trained model may take: tried one after the other."""


def _searched(task: Task, system: System, placement: Placement, costs: CostModel) -> Step | None:
    """The fastest of several searches, each with another share of the memory for states."""
    found = (_searched_within(task, system, placement, costs, budget) for budget in BUDGETS)
    return min((step for step in found if step is not None), key=lambda step: step.seconds, default=None)


def _searched_within(task: Task, system: System, placement: Placement, costs: CostModel, budget: float) -> Step | None:
    """Trained models first; then every other call takes its fastest mesh that fits. Weights that are only read lie in
    host memory while others work."""
    rows = task.rows or 64 * task.devices
    held = [0.0] * len(placement.blocks)
    chosen: dict[str, Work] = {}
    for work in _by_weight(_drafts(task, system, placement, rows)):
        found = _fastest(task, system, placement, work, tuple(held), costs, budget)
        if found is None:
            return None
        chosen[work.name] = found
        for block in found.blocks if found.call.kind == "train" else ():
            held[block] += state_bytes(task, system, work.role, found.mesh, False)
    works = tuple(chosen[work.name] for work in _drafts(task, system, placement, rows))
    transition = transition_seconds(task, system, placement, works[0].mesh, costs)
    seconds, calls = _walked(system, placement, works, transition, costs)
    return Step(placement, works, rows, seconds, calls, peak_bytes(system, placement, works, _all(held)))


def _drafts(task: Task, system: System, placement: Placement, rows: int) -> tuple[Work, ...]:
    alone = {role: mesh_of(task, placement.devices(role), zero=1) for role in task.models}
    home = placement.where.get(ROLLOUT, placement.where[ACTOR])
    size = sum(placement.blocks[block] for block in home)
    return tuple(works_of(task, system, placement, Layouts(alone, mesh_of(task, size)), rows))


def _by_weight(works: tuple[Work, ...]) -> list[Work]:
    """In the order in which meshes are chosen: states that stay, then what comes and goes."""
    order = {"train": 0, "forward": 1, "generate": 2}
    return sorted(works, key=lambda work: (order[work.call.kind], -work.call.model.parameters))


def _all(held: list[float]) -> Held:
    return Held(tuple(held), (0.0,) * len(held), sleeps=False)


def _fastest(
    task: Task,
    system: System,
    placement: Placement,
    work: Work,
    held: tuple[float, ...],
    costs: CostModel,
    budget: float,
) -> Work | None:
    size = sum(placement.blocks[block] for block in work.blocks)
    beside = max(held[block] for block in work.blocks)
    options = []
    for mesh in splits(task, size, "searched", work.call.model.layers):
        state = _own_state(task, system, work, mesh)
        if work.call.kind == "train" and state > budget * capacity_bytes(task.device):
            continue
        rows = max(1, -(-work.call.rows * work.mesh.dp // mesh.dp))
        option = replace(work, mesh=mesh, call=replace(work.call, rows=rows))
        fitting = sized(task, system, placement, option, _all([beside + state] * len(placement.blocks)))
        if fitting is not None:
            options.append(fitting)
    return min(options, key=lambda option: work_seconds(option, system, costs), default=None)


def _own_state(task: Task, system: System, work: Work, mesh: Mesh) -> float:
    """What the call's model adds to a device: its state, or a copy of its weights while the call lasts."""
    if work.call.kind == "generate":
        return 0.0  # counted as the call's own
    if work.call.kind == "train":
        return state_bytes(task, system, work.role, mesh, False)
    return frozen_bytes(work.call.model, mesh)
