"""The plan of a Sync, rank by rank: both ends of a message know it, and in the same order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from small_runs import TINY, placed_model, plan_of

from flexrlhf.config.model_settings import LoraSpec, ModelSpec
from flexrlhf.config.spec import RolloutSpec, SyncSpec
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shapes import model_shape
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.sync_plan import SyncPlan, transfers_of
from flexrlhf.weights.sync_volumes import SyncVolumes
from flexrlhf.weights.transfer_plan import WeightMessage, count
from flexrlhf.weights.transfers import NodeOf

RANKS, COPY = (0, 1, 2, 3), (2, 3, 4, 5)
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"zero": 3}, {"engine": "deepspeed", "zero": 3}]
BUCKET = 2000


def shape() -> ModelShape:
    made = model_shape("actor", ModelSpec(init=TINY))
    assert made is not None
    return made


def plans_of(source: dict[str, Any], copy: dict[str, Any], ranks: range = range(7)) -> dict[int, SyncPlan]:
    """The plan of each rank; two ranks store both models, and rank 6 neither."""
    trained, follower = placed_model("actor", RANKS, **source), placed_model("actor.shadow", COPY, **copy)
    return {rank: SyncPlan.of(trained, follower, shape(), BUCKET, rank) for rank in ranks}


@pytest.mark.parametrize("copy", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_both_ends_know_every_message(source: dict[str, Any], copy: dict[str, Any]) -> None:
    plans = plans_of(source, copy)
    sent: dict[tuple[int, int], list[WeightMessage]] = defaultdict(list)
    received: dict[tuple[int, int], list[WeightMessage]] = defaultdict(list)
    for rank, plan in plans.items():
        for bucket in plan.buckets:
            for message in bucket.sends:
                assert message.source == rank
                for receiver in message.destinations:
                    sent[rank, receiver].append(message)
            for message in bucket.receives:
                received[message.source, rank].append(message)
    assert sent == received
    assert not plans[6].buckets and not plans[6].parts and not plans[6].source_parts
    for rank in COPY:
        regions = [*(message.regions for bucket in plans[rank].buckets for message in bucket.receives)]
        stays = [bucket.stays for bucket in plans[rank].buckets]
        assert sum(map(count, regions + stays)) == sum(part.num_elements for part in plans[rank].parts.values())


@pytest.mark.parametrize("copy", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_buffers_are_within_the_setting(source: dict[str, Any], copy: dict[str, Any]) -> None:
    trained, follower = placed_model("actor", RANKS, **source), placed_model("actor.shadow", COPY, **copy)
    plan = transfers_of(trained, follower, shape(), BUCKET)
    assert len(plan.buckets) > 1 and 4 * SyncSpec.NUM_BUCKETS * plan.largest_buffers <= BUCKET
    # and in one bucket within what the memory plan counts
    for per_node in (8, 3, 2, 1):
        node_of: NodeOf = lambda rank, size=per_node: rank // size  # type: ignore[misc]  # noqa: E731
        for overlaps in (False, True):
            whole = transfers_of(trained, follower, shape(), 10**9, node_of, overlaps=overlaps)
            for rank, size in whole.buffers.items():
                found = SyncVolumes.of(trained, follower, shape(), node_of).on(rank)
                assert size <= found.packed + found.received + found.sent_on
                assert whole.received.get(rank, 0) == found.received
                first = [each for each in whole.messages if not each.is_sent_on and rank in each.destinations]
                # pieces end between rows
                arrived = sum(each.num_elements for each in first)
                assert not overlaps or arrived == pytest.approx(found.first, abs=100)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_source_packs_what_a_stage_stores_for_the_ranks_of_the_stage(tp: int) -> None:
    made = model_shape("actor", ModelSpec(init=TINY | {"num_hidden_layers": 4}))
    assert made is not None
    trained, packed = placed_model("actor", (0,)), []
    for pp in (1, 4):
        follower = placed_model("actor.shadow", tuple(range(1, 1 + pp * tp)), engine="megatron", pp=pp, tp=tp)
        packed.append(SyncVolumes.of(trained, follower, made).on(0).packed)
        assert transfers_of(trained, follower, made, 10**9).buffers[0] <= packed[-1]
    assert packed[0] == packed[1]


def test_volumes_are_computed_once_for_alike_ranks_and_for_plans_with_other_settings() -> None:
    ranks = tuple(range(32))
    trained, follower = placed_model("actor", ranks, tp=2), placed_model("actor.shadow", ranks, tp=4)
    larger = placed_model("actor", ranks, tp=2, micro_batch_tokens=4096)
    node_of: NodeOf = lambda rank: rank // 8  # noqa: E731
    found = [SyncVolumes.of(each, follower, shape(), node_of).on(rank) for each in (trained, larger) for rank in ranks]
    assert len({id(each) for each in found}) == 4
    apart = placed_model("actor.shadow", ranks[16:], tp=4)
    found = [SyncVolumes.of(trained, apart, shape(), node_of).on(rank) for rank in ranks]
    assert len({id(each) for each in found}) == 2 + 4


@pytest.mark.parametrize("copy", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_bytes_do_not_depend_on_buckets(source: dict[str, Any], copy: dict[str, Any]) -> None:
    trained, follower = placed_model("actor", RANKS, **source), placed_model("actor.shadow", COPY, **copy)
    planned = SyncPlan.all_bytes(trained, follower, shape())
    for size in (BUCKET, 10**9):
        assert 4 * sum(transfers_of(trained, follower, shape(), size).links.values()) == planned
    links = SyncPlan.bytes_by_link(trained, follower, shape(), BUCKET)
    assert sum(links.values()) == pytest.approx(planned)
    for rank in COPY:
        found, mean = (
            sum(size for (_, to), size in each.items() if to == rank)
            for each in (transfers_of(trained, follower, shape(), BUCKET).links, links)
        )
        assert 4 * found == pytest.approx(mean)


@pytest.mark.parametrize(
    ("source", "ranks", "expected"),
    [
        ({}, (0, 1), True),
        ({}, (1,), True),
        ({}, (0, 1, 2), False),
        ({"zero": 2}, (0, 1), False),
        ({"zero": 3}, (0, 1), False),
        ({"tp": 2}, (0, 1), False),
    ],
)
def test_nothing_crosses_where_each_rank_has_whole_tensors(
    source: dict[str, Any], ranks: tuple[int, ...], expected: bool
) -> None:
    trained, follower = placed_model("actor", (0, 1), **source), placed_model("actor.shadow", ranks)
    assert follower.is_filled_in_place(trained) == expected == (SyncPlan.all_bytes(trained, follower, shape()) == 0)


def test_adapters_are_sent_alone_where_the_copy_has_them_too() -> None:
    lora = LoraSpec(rank=2)
    trained = placed_model("actor", (0,), lora=lora)
    follower = placed_model("actor.shadow", (1,), lora=lora, dtype="bfloat16")
    adapted = plan_of([0.5] * 6, 2, "models.actor.lora={rank: 2}").shapes["actor"]
    plan = SyncPlan.of(trained, follower, adapted, BUCKET, 1)
    assert plan.dtype == "bfloat16" and plan.adapters is None
    assert set(plan.parts) == set(adapted.trained_parts(follower, 1)) == adapted.adapters


@pytest.mark.parametrize(
    ("settings", "gathers"),
    [({}, ()), ({"zero": 3}, ((0, 1, 2, 3),)), ({"tp": 2}, ()), ({"zero": 3, "tp": 2}, ((0, 2), (1, 3)))],
    ids=str,
)
def test_shards_of_adapters_are_gathered_where_they_are_merged(
    settings: dict[str, Any], gathers: tuple[tuple[int, ...], ...]
) -> None:
    """In float32 and by the ranks that have shards of one tensor-parallel part; base weights are not."""
    adapted = plan_of(None, 2, "rollout.engine=vllm", "models.actor.lora={rank: 4}").shapes["actor"]
    actor = placed_model("actor", (0, 1, 2, 3), lora=LoraSpec(rank=4), **settings)
    engine = replace(placed_model("actor.rollout", (4, 5), dtype="bfloat16"), rollout=RolloutSpec(engine="vllm"))
    assert (engine.adapter_gathers(actor) if adapted.is_merged_in(engine) else ()) == gathers
    received = 0
    for rank in actor.ranks:
        plan = SyncPlan.of(actor, engine, adapted, BUCKET, rank)
        assert plan.adapters is not None and plan.adapters.ranks == next((s for s in gathers if rank in s), (rank,))
        stored = adapted.parts_on(actor, rank)
        assert set(plan.adapters.parts) == {name for name, _ in adapted.trained}
        received += (len(plan.adapters.ranks) - 1) * part_elements(stored, list(plan.adapters.parts))
    sent = 2 * 2 * part_elements(parts := adapted.trained_parts(engine, 4), list(parts))
    assert SyncPlan.all_bytes(actor, engine, adapted) == sent + 4 * received
