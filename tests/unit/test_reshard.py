"""Weights between layouts: buckets that are gathered, groups of a plan, and the bytes of a Sync by hand."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import placed_model, plan_of

from flexrlhf.placement.groups import Group
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Save, Sync
from flexrlhf.trainer.restoration import bucket_names
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.sync_plan import SyncPlan

SHAPE = ModelShape((("norm.weight", (5,)), ("q_proj.weight", (4, 3))))
"""5 numbers that tensor parallelism leaves whole, and 4 rows of 3 that it cuts."""
SIX = [0.5] * 6
SHARDED, DEEPSPEED, TENSOR = {"zero": 3}, {"engine": "deepspeed", "zero": 3}, {"tp": 2}


# --- buckets


@pytest.mark.parametrize(
    ("item_bytes", "limit", "buckets"),
    [
        (4, 68, [["norm.weight", "q_proj.weight"]]),
        (4, 67, [["norm.weight"], ["q_proj.weight"]]),
        (2, 34, [["norm.weight", "q_proj.weight"]]),
        (2, 33, [["norm.weight"], ["q_proj.weight"]]),
        (4, 1, [["norm.weight"], ["q_proj.weight"]]),
    ],
)
@pytest.mark.parametrize("settings", [{}, SHARDED, DEEPSPEED, TENSOR], ids=str)
def test_all_ranks_of_all_layouts_cut_the_same_buckets(
    settings: dict[str, Any], item_bytes: int, limit: int, buckets: list[list[str]]
) -> None:
    """They count whole tensors, in sorted order of names."""
    model = placed_model("actor", (0, 1), **settings)
    for rank in model.ranks:
        parts = dict(reversed(SHAPE.parts_on(model, rank).items()))
        assert bucket_names(parts, item_bytes, limit) == buckets


def test_the_numbers_that_a_rank_holds_of_a_bucket() -> None:
    model = placed_model("actor", (0, 1), **SHARDED)
    held = [SHAPE.parts_on(model, rank) for rank in (0, 1)]
    assert [part_elements(parts, ["norm.weight"]) for parts in held] == [3, 2]
    assert [part_elements(parts, ["norm.weight", "q_proj.weight"]) for parts in held] == [9, 8]


def test_only_what_training_changes_travels() -> None:
    adapted = ModelShape(SHAPE.parameters, adapters=frozenset({"norm.weight"}))
    model = placed_model("actor", (0, 1), **SHARDED)
    assert list(adapted.trained_parts(model, 1)) == ["norm.weight"]
    assert SHAPE.trained_parts(model, 1) == SHAPE.parts_on(model, 1)


# --- bytes


def bytes_between(source: dict[str, Any], shadow: dict[str, Any]) -> int:
    trained, copy = placed_model("actor", (0, 1), **source), placed_model("actor.shadow", (2, 3), **shadow)
    return SyncPlan.all_bytes(trained, copy, SHAPE)


@pytest.mark.parametrize("source", [{}, SHARDED, DEEPSPEED, TENSOR], ids=str)
@pytest.mark.parametrize(
    ("shadow", "numbers"), [({}, 2 * 17), (TENSOR, 2 * (5 + 6)), (SHARDED, 9 + 8), (DEEPSPEED, 9 + 8)], ids=str
)
def test_bytes_of_a_sync_are_those_of_each_part(source: dict[str, Any], shadow: dict[str, Any], numbers: int) -> None:
    """Whatever the source's layout; in the type of the shadow."""
    assert bytes_between(source, shadow) == 4 * numbers
    assert bytes_between(source, shadow | {"dtype": "bfloat16"}) == 2 * numbers
    assert bytes_between(source | {"dtype": "bfloat16"}, shadow) == 4 * numbers


# --- in a plan

CROSSED = (
    "models.actor={init: {model_type: llama, vocab_size: 32, hidden_size: 8, intermediate_size: 16, "
    "num_hidden_layers: 1, num_attention_heads: 2}, zero: 3, shadow: {zero: 0, tp: 2}}",
    "models.critic={engine: deepspeed, zero: 3, shadow: {engine: torch, zero: 0}}",
)
TINY_CUT = 4 * 8 * 8 + 3 * 8 * 16 + 32 * 8
"""Of the tiny actor: q k v o, gate up down, the head. Below what stays whole: the embedding and three norms."""
TINY_WHOLE = 32 * 8 + 3 * 8


def sync_of(plan: Plan, source: str) -> Sync:
    return next(x for x in plan.schedule.instructions if isinstance(x, Sync) and x.source == source)


def test_bytes_of_a_sync_from_shards_to_tensor_parallel_parts() -> None:
    """Each of two ranks gets its half of what is split, and all that is not."""
    plan = plan_of(SIX, 4, *CROSSED)
    sync = sync_of(plan, "actor")
    assert not sync.gathers and not sync.is_in_place
    assert plan.traffic.sync_bytes(sync) == 4 * 2 * (TINY_CUT // 2 + TINY_WHOLE)


# --- groups


def test_the_groups_of_a_plan_with_shards_and_tensor_parallel() -> None:
    plan = plan_of(SIX, 4, *CROSSED)
    by_purpose: dict[str, list[tuple[int, ...]]] = {}
    for group in plan.groups:
        by_purpose.setdefault(group.purpose, []).append(group.ranks)
    by_purpose.pop("move")
    assert by_purpose == {
        # the two tensor-parallel ranks of actor.shadow are one replica, so they have no group of replicas
        "tp actor.shadow": [(2, 3)],
        "compute critic.shadow": [(2, 3)],
        "compute actor": [(0, 1)],
        "compute critic": [(0, 1)],
        "alone": [(0,), (1,)],
        "compute ref": [(2, 3)],
        "compute reward": [(2, 3)],
        "sync actor": [(0, 1, 2, 3)],
        "sync critic": [(0, 1, 2, 3)],
        # to save them
        "gather actor": [(0, 1)],
        "gather critic": [(0, 1)],
    }


def test_replicas_of_tensor_parallel_ranks_meet_part_by_part() -> None:
    plan = plan_of(None, 4, "models.critic.tp=2")
    groups = [group for group in plan.groups if group.purpose.endswith("critic")]
    assert groups == [
        Group("compute critic", (0, 2)),
        Group("compute critic", (1, 3)),
        Group("tp critic", (0, 1)),
        Group("tp critic", (2, 3)),
        Group("gather critic", (0, 1)),
    ]


def test_deepspeed_is_given_every_rank_by_itself_once() -> None:
    both = ("models.actor.engine=deepspeed", "models.critic.engine=deepspeed")
    alone = [group for group in plan_of(None, 2, *both).groups if group.alone]
    assert alone == [Group("alone", (0,), alone=True), Group("alone", (1,), alone=True)]
    assert not any(group.alone for group in plan_of(None, 2).groups)


def test_a_group_is_listed_once_and_never_of_one_rank_without_need() -> None:
    plan = plan_of(SIX, 4, *CROSSED, "save.every=1")
    assert len(set(plan.groups)) == len(plan.groups)
    assert all(len(group.ranks) > 1 or group.alone for group in plan.groups)


# --- saving


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ((), (0,)),
        (("models.critic.zero=3",), (0, 1, 2, 3)),
        (("models.critic.tp=2",), (0, 1)),
        (("models.critic.tp=2", "models.critic.zero=3"), (0, 1, 2, 3)),
        (("models.critic.engine=deepspeed", "models.critic.zero=2"), (0,)),
        (("models.critic.engine=deepspeed", "models.critic.zero=3"), (0, 1, 2, 3)),
    ],
)
def test_the_ranks_that_hold_all_weights_save_them(settings: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    plan = plan_of(None, 4, *settings)
    save = next(x for x in plan.schedule.instructions if isinstance(x, Save) and x.model == "critic")
    assert save.ranks == ranks
    assert len(ranks) == 1 or Group("gather critic", ranks) in plan.groups


# --- to an engine that generates

VLLM = "rollout.engine=vllm"
TINY_ALL = TINY_CUT + TINY_WHOLE
TINY_LINEAR = 4 * 8 * 8 + 3 * 8 * 16
"""Layers of the tiny actor that have adapters."""


def engine_sync(placement: object, devices: int, *overrides: str) -> tuple[Plan, Sync]:
    plan = plan_of(placement, devices, VLLM, *overrides)
    return plan, sync_of(plan, "actor")


@pytest.mark.parametrize("overrides", [(), ("rollout.tp=2",), ("models.actor.lora={}",), ("rollout.dtype=bfloat16",)])
def test_in_place_nothing_crosses(overrides: tuple[str, ...]) -> None:
    plan, sync = engine_sync(None, 2, *overrides)
    assert sync.is_in_place
    assert (sync.ranks, sync.gathers, plan.traffic.sync_bytes(sync)) == ((0, 1), (), 0)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
@pytest.mark.parametrize(("overrides", "item"), [((), 4), (("rollout.dtype=bfloat16",), 2)])
def test_on_the_same_ranks_the_other_half_comes_in_the_type_of_the_engine(
    engine: str, overrides: tuple[str, ...], item: int
) -> None:
    plan, sync = engine_sync(None, 2, f"models.actor.engine={engine}", "models.actor.zero=3", *overrides)
    assert not sync.gathers and not sync.is_in_place
    assert plan.traffic.sync_bytes(sync) == 2 * item * TINY_ALL // 2


def test_on_the_same_ranks_replicas_get_the_other_half_of_what_is_split() -> None:
    """Two replicas of two ranks each: all have the norms and the embedding whole."""
    plan, sync = engine_sync(None, 4, "models.actor.tp=2")
    assert not sync.gathers and not sync.is_in_place
    assert plan.traffic.sync_bytes(sync) == 4 * 4 * TINY_CUT // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_to_merge_shards_adapters_are_gathered_in_float32(dtype: str) -> None:
    """A and B of each target, halved between two ranks; rank 2 divides them all."""
    lora = ("models.actor.lora={rank: 2}", "models.actor.zero=3", f"rollout.dtype={dtype}")
    adapters, item = 2 * (4 * (8 + 8) + 3 * (8 + 16)), 4 if dtype == "float32" else 2
    plan, sync = engine_sync(None, 2, *lora)
    assert plan.traffic.sync_bytes(sync) == 2 * 4 * adapters // 2 + item * TINY_LINEAR
    plan, sync = engine_sync(SIX, 4, *lora)
    assert sync.gathers == ((0, 1),)
    assert plan.traffic.sync_bytes(sync) == 2 * 4 * adapters // 2 + 2 * item * TINY_LINEAR


def test_an_engine_apart_is_sent_its_part() -> None:
    """Each of two ranks gets what it holds; the first of them all the words."""
    plan, sync = engine_sync(SIX, 4, "rollout.tp=2")
    assert not sync.is_in_place
    assert plan.traffic.sync_bytes(sync) == 4 * (2 * TINY_LINEAR // 2 + 2 * 3 * 8 + 2 * 32 * 8)
