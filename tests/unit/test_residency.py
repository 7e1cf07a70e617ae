"""Offload and Reload stand where a rank's memory would overflow, and nothing is used while it is away."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from small_runs import plan_of

from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Offload, Reload, Run, Sync
from flexrlhf.strategies.residency import DeviceMemory, resident_models

SIX = "placement=[0.5,0.5,0.5,0.5,0.5,0.5]"
VLLM = "rollout.engine=vllm"
AWAKE = "rollout.sleep=false"
CHUNKS = ("schedule.num_chunks=4", "algorithm.num_mini_batches=4")


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
    away, woken = set(plan.offloaded.get(rank, ())), set[str]()
    memory = DeviceMemory(plan.sizing, plan.cluster, plan.batch)
    needs = []

    def state(name: ModelName) -> int:
        """Bytes of a model; the cache of a rollout engine is allocated when it generates."""
        of_cache = plan.sizing.kv_bytes(plan.placement[name]) if name in woken else 0
        return memory.state(rank, name) - of_cache

    for _, _, item in plan.schedule.walk(rank, plan.spec.steps):
        match item:
            case Offload(model=name):
                assert name not in away, f"{name} is put away twice"
                away.add(name)
            case Reload(model=name):
                assert name in away, f"{name} is taken back twice"
                away.discard(name)
                woken.add(name)
            case _:
                woken -= set(item.uses) if isinstance(item, Run | Eval) else set()
                touched = resident_models(item, placed)
                assert not away & set(touched), f"{item.label} touches {away & set(touched)}"
                resting = sum(state(name) for name in placed if name not in away)
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
    "rollout": (VLLM, *CHUNKS),
    "rollout that stays awake": (VLLM, AWAKE, "save.every=2"),
    "tensor parallel rollout": ("placement=[1,1,0.5,0.5]", VLLM, "rollout.tp=2", "save.every=2"),
    "rollout apart": (SIX, VLLM, *CHUNKS, "sync.every=2"),
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
    memory = DeviceMemory(plan.sizing, plan.cluster, plan.batch)
    mine = [(item, resident_models(item, placed)) for item in plan.schedule.for_rank(rank)]
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


# --- rollout engines that sleep


def awake_at(plan: Plan, rank: int) -> dict[str, list[bool]]:
    """Label of what a rank does, in order → whether its rollout engine is on the device, each time."""
    awake = "actor.rollout" not in plan.offloaded.get(rank, ())
    found: dict[str, list[bool]] = defaultdict(list)
    for _, _, item in plan.schedule.walk(rank, plan.spec.steps):
        if isinstance(item, Offload | Reload):
            awake = isinstance(item, Reload) if item.model == "actor.rollout" else awake
        else:
            found[item.label].append(awake)
    return found


@pytest.mark.parametrize("overrides", [(), CHUNKS, ("placement=[1,1,0.5,0.5]",), ("rollout.tp=2", *CHUNKS)])
@pytest.mark.parametrize("share", [None, 0.8, 0.55])
def test_an_engine_is_awake_to_generate_and_for_its_sync_and_asleep_while_others_train(
    share: float | None, overrides: tuple[str, ...]
) -> None:
    plan = planned(share, VLLM, *overrides)
    for rank in (0, 1):
        found = awake_at(plan, rank)
        assert all(found["generate on actor.rollout"]) and all(found["weights actor -> actor.rollout"])
        for label in ("advantages on actor", "parity on actor", "train_actor on actor", "train_critic on critic"):
            assert found[label] and not any(found[label]), label


def test_between_two_chunks_an_engine_stays_awake_where_memory_allows() -> None:
    """It wakes up once and falls asleep once a step; what else works before the last chunk, works beside it."""
    plan = planned(None, VLLM, *CHUNKS)
    assert [(type(item), item.model) for item in residences(plan)] == [
        (Offload, "actor.rollout"),
        (Reload, "actor.rollout"),
    ]
    assert awake_at(plan, 0)["logprobs on actor"] == [True, True, False, False] * plan.spec.steps


@pytest.mark.parametrize(
    ("overrides", "refilled"),
    [
        ((), [True, True]),
        (("models.actor.lora={rank: 4}",), [False, False]),
        (("placement=[1,1,0.5,0.5]",), [True, True]),
    ],
)
def test_weights_that_a_sync_brings_anyway_are_not_copied(overrides: tuple[str, ...], refilled: list[bool]) -> None:
    """Adapters change some of them alone."""
    assert [each.is_refilled for each in residences(planned(None, VLLM, *overrides))] == refilled


def test_an_engine_put_away_between_two_chunks_keeps_its_weights() -> None:
    instructions = planned(0.55, VLLM, *CHUNKS).schedule.instructions
    found = defaultdict(set)
    for index, each in enumerate(instructions):
        if isinstance(each, Offload) and each.model == "actor.rollout":
            used = (use for use in instructions[index + 1 :] if isinstance(use, Run | Sync) and each.model in use.label)
            found[type(next(used))].add(each.is_refilled)
    assert found == {Run: {False}, Sync: {True}}


def test_an_engine_is_awake_when_the_run_starts() -> None:
    for share in (None, 0.55):
        plan = planned(share, VLLM)
        assert all("actor.rollout" not in names for names in plan.offloaded.values())


@pytest.mark.parametrize("overrides", [(VLLM, AWAKE), (SIX, VLLM), (SIX, VLLM, "rollout.process=child")])
def test_engines_apart_and_those_told_to_stay_awake_do_not_sleep(overrides: tuple[str, ...]) -> None:
    assert residences(planned(None, *overrides)) == []
    assert residences(planned(1.0, *overrides)) == []


def test_sleep_alone_makes_room_for_training() -> None:
    """On devices that hold what a run with a sleeping engine needs, one that stays awake has to be put away, too."""
    peak = max(memory.peak_bytes for memory in planned(None, VLLM).memories)
    memory = f"cluster.memory_gb={peak / 1e9}"
    assert {item.model for item in residences(plan_of(None, 2, VLLM, memory))} == {"actor.rollout"}
    assert residences(plan_of(None, 2, VLLM, AWAKE, memory))
    assert max(memory.peak_bytes for memory in planned(None, VLLM, AWAKE).memories) > peak


def test_what_nobody_knows_the_size_of_sleeps_all_the_same() -> None:
    """The critic's architecture is known to loading alone."""
    plan = planned(None, VLLM, "models.reward.init={model_type: gpt2}")
    assert {item.model for item in residences(plan)} == {"actor.rollout"}
