"""The plan of a Sync, rank by rank: every receiver gets its parts once, from the sender that its plan names."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import TINY, placed_model

from flexrlhf.config.spec import LoraSpec, ModelSpec
from flexrlhf.weights.reshard import Parts, pair_ranks, trained_parts
from flexrlhf.weights.shapes import ModelShape, model_shape
from flexrlhf.weights.sync_plan import SyncPlan, plan_sync

RANKS, COPY = (0, 1, 2, 3), (2, 3, 4, 5)
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"zero": 3}, {"engine": "deepspeed", "zero": 3}]


def shape() -> ModelShape:
    made = model_shape("actor", ModelSpec(init=TINY))
    assert made is not None
    return made


def plans_of(source: dict[str, Any], copy: dict[str, Any], ranks: range = range(7)) -> dict[int, SyncPlan]:
    """The plan of each rank; two ranks store both models, and rank 6 neither."""
    trained, follower = placed_model("actor", RANKS, **source), placed_model("actor.shadow", COPY, **copy)
    return {
        rank: plan_sync(trained, follower, shape(), pair_ranks(RANKS, COPY), bucket_bytes=2000, rank=rank)
        for rank in ranks
    }


@pytest.mark.parametrize("copy", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_receiver_gets_its_parts_from_the_sender_in_its_plan(
    source: dict[str, Any], copy: dict[str, Any]
) -> None:
    plans = plans_of(source, copy)
    received: dict[int, Parts] = {rank: plan.own_parts for rank, plan in plans.items() if plan.own_parts is not None}
    assert set(received) == set(RANKS) & set(COPY)
    for rank, plan in plans.items():
        for names, packets in zip(plan.buckets, plan.send.packets if plan.send else (), strict=bool(plan.send)):
            for packet in packets:
                for receiver in packet.receivers:
                    receive = plans[receiver].receive
                    assert receive is not None and receive.sender == rank
                    before = received.get(receiver, {})
                    assert not set(before) & set(names)
                    received[receiver] = {**before, **dict(zip(names, packet.parts, strict=True))}
    follower = placed_model("actor.shadow", COPY, **copy)
    assert received == {rank: trained_parts(follower, shape(), rank) for rank in COPY}


def test_all_ranks_plan_the_same_buckets_and_one_outside_does_nothing() -> None:
    plans = plans_of({"zero": 3}, {"tp": 2})
    assert len({plan.buckets for plan in plans.values()}) == 1
    assert plans[6].send is plans[6].receive is None


def test_a_rank_that_sends_nothing_still_gathers_with_those_that_do() -> None:
    """Of four replicas with whole weights only those that send take part; with shards all do."""
    transfers, copy = pair_ranks(RANKS, (5,)), placed_model("actor.shadow", (5,))
    for source, taking_part in (({}, [0]), ({"zero": 3}, [0, 1, 2, 3])):
        trained = placed_model("actor", RANKS, **source)
        plans = [plan_sync(trained, copy, shape(), transfers, 2000, rank) for rank in RANKS]
        assert [plan.rank for plan in plans if plan.send is not None] == taking_part
        assert [plan.send.receivers for plan in plans if plan.send is not None] == [(5,)] + [()] * (
            len(taking_part) - 1
        )


def test_receivers_with_the_same_parts_share_a_buffer() -> None:
    trained = placed_model("actor", (0,))
    for copy, shared in (({}, [(1, 2, 3, 4)]), ({"tp": 2}, [(1, 3), (2, 4)])):
        follower = placed_model("actor.shadow", (1, 2, 3, 4), **copy)
        plan = plan_sync(trained, follower, shape(), pair_ranks((0,), follower.ranks), 2000, 0)
        assert plan.send is not None
        sliced = next(packets for packets in plan.send.packets if len(packets) == len(shared))
        assert [packet.receivers for packet in sliced] == shared


def test_a_plan_has_the_type_of_the_copy_and_no_adapters_to_merge_into_another_trained_layout() -> None:
    lora = LoraSpec(rank=3)
    trained = placed_model("actor", (0,), lora=lora)
    follower = placed_model("actor.shadow", (1,), lora=lora, dtype="bfloat16")
    plan = plan_sync(trained, follower, shape(), pair_ranks((0,), (1,)), 2000, 0)
    assert plan.dtype == "bfloat16" and plan.send is not None and plan.send.merge is None
