"""Offload and Reload stand where a rank's memory would overflow, and nothing is used while it is away."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from small_runs import plan_of

from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Offload, Reload, Run, Sync

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


def test_nothing_moves_where_nobody_says_what_devices_hold() -> None:
    assert residences(planned(None)) == [] and planned(None).offloaded == {}


def test_nothing_moves_where_all_fits() -> None:
    assert residences(planned(1.0)) == []


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
