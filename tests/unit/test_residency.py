"""Offload and Reload stand where a rank's memory would overflow, and nothing is used while it is away."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from small_runs import plan_of

from flexrlhf.plan import Plan
from flexrlhf.strategies.instructions import Offload, Reload
from flexrlhf.strategies.residency import Memory, models_of
from flexrlhf.strategies.schedule import walk

SIX = "placement=[0.5,0.5,0.5,0.5,0.5,0.5]"


def planned(share: float | None, *overrides: str) -> Plan:
    """A run on devices that hold ``share`` of its highest peak; None: nobody says what they hold."""
    plan = plan_of(None, 2, *overrides)
    if share is None:
        return plan
    peak = max(memory.peak_bytes for memory in plan.memories)
    return plan_of(None, 2, *overrides, f"cluster.memory_gb={share * peak / 1e9}")


def residences(plan: Plan) -> list[Offload | Reload]:
    return [item for item in plan.schedule.instructions if isinstance(item, Offload | Reload)]


def replay(plan: Plan, rank: int) -> list[int]:
    """Walk a whole run on one rank; of every instruction what it needs, with the models that are there."""
    placed = tuple(model.name for model in plan.placement.on_rank(rank))
    away = set(plan.offloaded.get(rank, ()))
    memory = Memory(plan.sizing, plan.cluster, plan.batch, plan.graph.evaluation)
    needs = []
    for _, _, item in walk(plan.schedule, rank, plan.spec.steps):
        match item:
            case Offload(model=name):
                assert name not in away, f"{name} is put away twice"
                away.add(name)
            case Reload(model=name):
                assert name in away, f"{name} is taken back twice"
                away.discard(name)
            case _:
                touched = models_of(item, placed)
                assert not away & set(touched), f"{item.label} touches {away & set(touched)}"
                resting = sum(memory.state(rank, name) for name in placed if name not in away)
                needs += [resting + memory.needed_for(rank, item)] if touched else []
    return needs


def test_nothing_moves_where_nobody_says_what_devices_hold() -> None:
    assert residences(planned(None)) == [] and planned(None).offloaded == {}


def test_nothing_moves_where_all_fits() -> None:
    assert residences(planned(1.0)) == []


OVERRIDES = {
    "co-located": (),
    "interleaving": ("placement=[1,1,0.5,0.5]",),
    "six": (SIX,),
    "lag": (SIX, "schedule.lag=1", "sync.every=2"),
    "chunks": (SIX, "schedule.num_chunks=2", "algorithm.num_mini_batches=4"),
    "saving": ("save.every=2",),
}


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.45])
def test_models_are_there_when_they_are_touched(share: float, overrides: tuple[str, ...]) -> None:
    plan = planned(share, *overrides)
    assert share > 0.9 or residences(plan), "nothing was put away"
    for rank in range(plan.placement.num_ranks):
        replay(plan, rank)


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
def test_the_run_fits_where_every_instruction_fits_by_itself(overrides: tuple[str, ...]) -> None:
    free = planned(None, *overrides)
    for rank in range(free.placement.num_ranks):
        alone = max(least_of(free, rank), default=0)
        plan = plan_of(None, 2, *overrides, f"cluster.memory_gb={(alone + 1) / 1e9}")
        assert max(replay(plan, rank), default=0) <= plan.cluster.memory_bytes(rank), rank


def least_of(plan: Plan, rank: int) -> list[int]:
    """What each instruction needs with nothing there but the models that it touches."""
    placed = tuple(model.name for model in plan.placement.on_rank(rank))
    memory = Memory(plan.sizing, plan.cluster, plan.batch, plan.graph.evaluation)
    mine = [(item, models_of(item, placed)) for item in plan.schedule.for_rank(rank)]
    return [
        sum(memory.state(rank, name) for name in touched) + memory.needed_for(rank, item)
        for item, touched in mine
        if touched
    ]


def test_the_model_used_farthest_in_the_future_goes() -> None:
    """Of those that wait while the reference computes, the reward model is next and the actor last but one."""
    plan = planned(0.8)
    first = residences(plan)[0]
    order = [item.model for item in plan.schedule.for_rank(0) if hasattr(item, "operator")]
    assert isinstance(first, Offload | Reload) and first.model in order


def test_a_rare_visit_leaves_what_it_found() -> None:
    """A Save that is due every second step brings its model back and puts it away again, both only when it is due."""
    plan = planned(0.45, "save.every=2")
    rare = [item for item in residences(plan) if item.rare]
    assert rare, "no model is away when it is saved"
    balance: dict[tuple[str, int], int] = defaultdict(int)
    for item in rare:
        assert (item.every, item.at_end) == (2, True)
        for rank in item.ranks:
            balance[item.model, rank] += 1 if isinstance(item, Reload) else -1
    assert not any(balance.values()), balance


def test_random_capacities_never_break_the_walk() -> None:
    draw = random.Random(3)
    for _ in range(40):
        overrides = draw.choice(list(OVERRIDES.values()))
        plan = planned(draw.uniform(0.05, 1.1), *overrides)
        for rank in range(plan.placement.num_ranks):
            replay(plan, rank)


def test_planning_again_adds_nothing_twice() -> None:
    """A plan without its residences, planned again, is the same plan."""
    plan = planned(0.6)
    bare = tuple(item for item in plan.schedule.instructions if not isinstance(item, Offload | Reload))
    again = replace(plan, schedule=replace(plan.schedule, instructions=bare), offloaded={}).with_residency()
    assert again.schedule == plan.schedule and again.offloaded == plan.offloaded
