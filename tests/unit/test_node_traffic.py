"""Bytes that a plan's step puts on the links between nodes."""

from __future__ import annotations

import pytest
from small_runs import plan_of

from flexrlhf.plan.node_traffic import SentBytes
from flexrlhf.plan.plan_text import format_plan

TWO_NODES = "cluster={nodes: [{count: 2, devices: 2}], memory_gb: 9}"
SIX = [0.5] * 6


def test_one_node_sends_nothing() -> None:
    assert plan_of([1, 1, 1, 1], 4).traffic.sent == {}
    assert "between nodes" not in format_plan(plan_of([1, 1, 1, 1], 4))


@pytest.mark.parametrize("zero", [0, 2])
def test_replicas_send_their_gradients_once_for_each_optimizer_step(zero: int) -> None:
    """Two nodes: half of the bytes goes each way, for sums and for gathered weights."""
    stages = [f"models.{role}.zero={zero}" for role in ("actor", "critic")]
    plan = plan_of([1, 1, 1, 1], 4, TWO_NODES, "algorithm.num_mini_batches=4", "algorithm.epochs=2", *stages)
    size = sum(4 * plan.shapes[role].num_trained for role in ("actor", "critic"))
    assert plan.traffic.sent == {node: SentBytes(gradients=8 * size) for node in (0, 1)}


def test_a_split_sends_weights_one_way_and_rows_the_other() -> None:
    plan = plan_of(SIX, 4, TWO_NODES, "sync.every=4")
    found = plan.traffic.sent
    size = sum(4 * plan.shapes[role].num_trained for role in ("actor", "critic"))
    # once for both replicas of each shadow, every fourth step
    assert found[0] == SentBytes(weights=size / 4)
    assert found[1].weights == found[1].gradients == 0 < found[1].rows < 1e5


def test_weights_of_an_unknown_architecture_are_not_counted() -> None:
    plan = plan_of(SIX, 4, TWO_NODES, "models.critic.init.model_type=gemma")
    assert plan.traffic.sent[0].weights == 4 * plan.shapes["actor"].num_trained
    assert "? B" in format_plan(plan)


def test_shards_that_passes_gather_are_named() -> None:
    plan = plan_of([1, 1, 1, 1], 4, TWO_NODES, "models.critic.zero=3")
    critic = plan.traffic.sent[0]
    assert critic.passes == ("critic",)
    actor = 4 * plan.shapes["actor"].num_trained
    assert critic.gradients == plan.batch.num_mini_batches * actor
    assert "each of nodes 0-1 sends" in format_plan(plan) and "shards of critic in every pass" in format_plan(plan)


@pytest.mark.parametrize("zero", [2, 3])
def test_shards_in_nodes_send_their_gradients_once_and_no_weights(zero: int) -> None:
    """Each rank of a node sends its half, which makes all of them."""
    plan = plan_of(
        [1, 1, 1, 1], 4, TWO_NODES, f"models.critic={{zero: {zero}, shard: node}}", "models.ref={zero: 3, shard: node}"
    )
    size = sum(4 * plan.shapes[role].num_trained for role in ("actor", "critic"))
    assert plan.traffic.sent == {node: SentBytes(gradients=plan.batch.num_mini_batches * size) for node in (0, 1)}


def test_tensor_parallel_ranks_share_the_link() -> None:
    plan = plan_of([1, 1, 1, 1], 4, TWO_NODES, "models.critic.tp=2")
    whole = plan_of([1, 1, 1, 1], 4, TWO_NODES)
    # norms, which are not split, are sent by both
    assert whole.traffic.sent[0].gradients <= plan.traffic.sent[0].gradients < 1.2 * whole.traffic.sent[0].gradients
