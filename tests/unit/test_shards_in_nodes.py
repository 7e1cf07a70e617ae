"""Hybrid sharding: which ranks share shards, what a plan says of it, what it costs, where it is refused and advised."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import plan_of

from flexrlhf.config.spec import Spec
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.costs.links import ACROSS
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.plan.suggestions import memory_suggestions
from flexrlhf.strategies.instructions import Save, Sync

TWO_NODES = "cluster={nodes: [{count: 2, devices: 2}]}"
IN_NODES = ("models.actor={init: {model_type: llama, hidden_size: 64}, zero: 3, shard: node}",)
ALL = [1, 1, 1, 1]


def sft(nodes: int, model: str = "qwen2.5-32b", network: float | None = None, **settings: Any) -> Plan:
    """Supervised training on nodes of eight A100."""
    node = {"count": nodes, "devices": 8, "class": "A100-80G", "network_gb_s": network}
    raw: dict[str, Any] = {
        "name": "sft",
        "algorithm": {"name": "sft", "prompts_per_step": 512},
        "models": {"actor": {"init": model, "zero": 3, "activation_checkpointing": True, **settings}},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 1024, "max_response_tokens": 1024},
        "cluster": {"nodes": [node]},
    }
    return make_plan(Spec.parse(raw))


# --- which ranks


def test_a_node_shares_shards_and_nodes_have_copies() -> None:
    plan = plan_of(ALL, 4, TWO_NODES, *IN_NODES)
    model = plan.placement["actor"]
    assert [model.shard_set(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [model.copy_set(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    found = {(group.purpose, group.ranks) for group in plan.groups if group.purpose.endswith(" actor")}
    assert {
        ("shard actor", (0, 1)),
        ("shard actor", (2, 3)),
        ("copies actor", (0, 2)),
        ("copies actor", (1, 3)),
    } < found
    assert "dp 4 zero 3 in each node" in format_plan(plan)
    # one node saves
    assert next(each.ranks for each in plan.schedule.instructions if isinstance(each, Save)) == (0, 1)


def test_tensor_parallel_parts_each_have_shards_and_copies() -> None:
    nodes = "cluster={nodes: [{count: 2, devices: 4}]}"
    model = plan_of(ALL, 8, nodes, "models.actor.zero=2", "models.actor.shard=node", "models.actor.tp=2").placement[
        "actor"
    ]
    assert (model.shard_set(0), model.copy_set(0)) == ((0, 2), (0, 4))
    assert (model.shard_set(7), model.copy_set(7)) == ((5, 7), (3, 7))


@pytest.mark.parametrize("setting", ["models.actor.shard=node", "models.actor.shard=all"])
def test_on_one_node_it_is_the_same_as_all(setting: str) -> None:
    plan = plan_of(ALL, 4, "models.actor.zero=3", setting)
    assert plan.placement["actor"].num_shards == 4 and not any("copies" in group.purpose for group in plan.groups)
    assert plan.memories == plan_of(ALL, 4, "models.actor.zero=3").memories


def test_communicators_of_shards_and_copies_are_counted() -> None:
    one, other = (sft(2, "qwen2.5-14b", shard=shard) for shard in ("all", "node"))
    assert (one.most_communicators, other.most_communicators) == (1, 3)


# --- what is refused


def test_a_shadow_inherits_it_unless_another_engine_computes_it() -> None:
    def shadow(settings: str) -> Plan:
        placed = {name: {"ranks": "4-7"} for name in ("actor.shadow", "critic.shadow", "ref", "reward")}
        placed |= {name: {"ranks": "0-3"} for name in ("actor", "critic")}
        nodes = "cluster={nodes: [{count: 4, devices: 2}]}"
        return plan_of(
            placed, 8, nodes, "models.actor.zero=3", "models.actor.shard=node", f"models.actor.shadow={settings}"
        )

    assert shadow("{}").placement["actor.shadow"].num_shards == 2
    assert shadow("{shard: all}").placement["actor.shadow"].num_shards == 4
    assert shadow("{engine: deepspeed}").placement["actor.shadow"].num_shards == 4
    assert shadow("{zero: 0}").placement["actor.shadow"].num_shards == 1


# --- bytes and seconds


def test_a_rank_stores_the_part_of_a_node() -> None:
    everywhere, in_nodes = (sft(4, "qwen2.5-14b", shard=shard) for shard in ("all", "node"))
    one, other = (plan.state(plan.placement["actor"], 0) for plan in (everywhere, in_nodes))
    assert one is not None and other is not None
    assert other.training == pytest.approx(4 * one.training, rel=1e-3)


def test_no_weights_cross_to_copies_on_the_same_nodes() -> None:
    """Each node has all shards, so that a copy of other shards takes them from its own."""
    placed = {"generate": {"ranks": "0-3", "tp": 2}, "train_actor": {"ranks": "0-3", "zero": 3, "shard": "node"}}
    others = dict.fromkeys(("ref_logprobs", "values", "scores", "train_critic"), {"ranks": "0-3"})
    plan = plan_of({"operators": placed | others}, 4, TWO_NODES)
    sync = next(each for each in plan.schedule.instructions if isinstance(each, Sync))
    assert plan.traffic.sync_links(sync)
    assert all(source // 2 == destination // 2 for source, destination in plan.traffic.sync_links(sync))


@pytest.mark.parametrize(("nodes", "network"), [(2, 25.0), (8, 25.0), (8, None)])
def test_gathers_inside_nodes_take_less_time(nodes: int, network: float | None) -> None:
    lora = {"rank": 16}
    everywhere, in_nodes = (simulate(sft(nodes, network=network, lora=lora, shard=each)) for each in ("all", "node"))
    assert in_nodes.seconds < everywhere.seconds


@pytest.mark.parametrize("micro_batch_tokens", [2048, 8192])
def test_shards_are_summed_over_nodes_once_for_an_optimizer_step(micro_batch_tokens: int) -> None:
    """Through a network so slow that nothing else counts: twice the half of a node's gradients, in 16 bits."""
    plan = sft(2, "qwen2.5-7b", 0.01, shard="node", micro_batch_tokens=micro_batch_tokens)
    size = 2 * plan.shapes["actor"].num_parameters
    reached = size / (ACROSS.share * 0.01e9)
    assert simulate(plan).seconds == pytest.approx(reached, rel=0.05)


def test_a_plan_that_lacks_memory_suggests_all() -> None:
    plan = sft(2, shard="node")
    assert plan.memory(0).peak_bytes > (plan.device_bytes(0) or 0)
    (best, *_) = memory_suggestions(plan, 0)
    assert best.change == "models.actor.shard=all" and best.same_numbers and best.suffices


@pytest.mark.parametrize(
    ("model", "written", "chosen"),
    [
        ("qwen2.5-14b", {}, "node"),
        ("qwen2.5-14b", {"shard": "all"}, "all"),
        # a node has no room for its states
        ("qwen2.5-32b", {}, "all"),
    ],
)
def test_advise_shards_in_nodes_where_they_have_room(model: str, written: dict[str, str], chosen: str) -> None:
    spec = sft(2, model, 25.0, **written).spec
    best = advise(spec, seconds_limit=2.0).best
    settings = best.plan.spec.models.actor
    assert settings is not None and (settings.zero, settings.shard) == (3, chosen)
