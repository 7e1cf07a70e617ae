"""No rank waits for ever with NCCL: the rules on small lists, the plans that single messages block, and large ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from emulator import emulate
from nccl_rules import Await, Call, Message, Post, find_block
from random_specs import valid_specs

from flexrlhf.config.spec_file import load_spec, parse_spec
from flexrlhf.placement.groups import Group
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan

CONFIGS = Path(__file__).parents[2] / "configs"
ALL = Group("all", (0, 1, 2))
QWEN = {
    **{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 3, "intermediate_size": 18944},
    **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
}
SMALL = {
    **{"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 8, "intermediate_size": 1536},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
}
TINY = SMALL | {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 6}


def calls_of(plan: Plan) -> dict[int, list[Call]]:
    traces = emulate(plan, "asynchronous", deadline_seconds=300)
    return {rank: trace.calls for rank, trace in traces.items()}


def lower_first(rank: int, messages: Sequence[Message]) -> list[Message]:
    """Single messages as they were sent once: to higher ranks, from lower ones, then the others."""
    turns = [(m for m in messages if (m[0] == rank) == is_sent and (m[0] < m[1]) == is_up) for is_sent, is_up in TURNS]
    return [message for turn in turns for message in turn]


TURNS = ((True, True), (False, True), (True, False), (False, False))


# --- the rules


def test_single_messages_of_three_ranks_close_a_circle() -> None:
    """0 waits for 1, 1 for 2, 2 for 0."""
    around = ((0, 1), (1, 2), (2, 0))
    calls = {rank: [Post("around", ALL, tuple(m for m in around if rank in m))] for rank in range(3)}
    assert not find_block(calls)

    def sends_first(rank: int, messages: Sequence[Message]) -> list[Message]:
        return sorted(messages, key=lambda message: message[0] != rank)

    assert "rank 2: its host" in find_block(calls, sends_first)
    assert not find_block(calls, lambda rank, messages: sorted(messages))


def test_collectives_in_different_orders_block() -> None:
    one, two = Post("one", ALL), Post("two", ALL)
    assert not find_block({rank: [one, two, Await("one"), Await()] for rank in range(3)})
    assert find_block({0: [one, two], 1: [one, two], 2: [two, one]})


def test_groups_have_queues_of_their_own_but_one_main_stream() -> None:
    pair = Group("pair", (0, 1))
    one, two = Post("one", ALL), Post("two", pair)
    assert not find_block({0: [one, two], 1: [two, one], 2: [one]})
    assert find_block({0: [one, Await("one"), two], 1: [two, Await("two"), one], 2: [one]})


def test_a_batch_ends_when_its_last_message_has_crossed() -> None:
    batches = {0: [Post("a", ALL, ((0, 1), (0, 2))), Await("a"), Await()], 1: [Post("a", ALL, ((0, 1),))]}
    assert find_block({**batches, 2: []})
    assert not find_block({**batches, 2: [Post("a", ALL, ((0, 2),))]})
    assert find_block({0: [Post("a", ALL, ((0, 1),))], 1: [Post("a", ALL, ((0, 1), (0, 1)))], 2: []})


# --- plans


def plan_of(cluster: dict[str, Any], init: dict[str, Any], rollout: dict[str, Any], **settings: Any) -> Plan:
    """PPO for two steps, with an actor that is cut."""
    role = {"init": init}
    raw: dict[str, Any] = {
        "name": "nccl",
        "steps": 2,
        "algorithm": {"name": "ppo", "prompts_per_step": 16, "num_mini_batches": 1},
        "models": {"actor": role | settings.pop("actor", {"zero": 3}), "reward": role},
        "data": {"path": "rows.jsonl"},
        "cluster": cluster,
        "rollout": rollout,
        **settings,
    }
    return make_plan(parse_spec(raw))


NODE = {"nodes": [{"count": 1, "devices": 8, "class": "A100-80G"}]}
ONCE_BLOCKED = {
    "zero 3, vLLM, 4 ranks": ({"devices": 4}, TINY, {"engine": "vllm"}, {}),
    "zero 3, vLLM, 8 ranks": ({"devices": 8}, SMALL, {"engine": "vllm"}, {}),
    "DeepSpeed, torch, 8 ranks": (
        *({"devices": 8}, TINY, {"engine": "torch"}),
        {"actor": {"engine": "deepspeed", "zero": 3}},
    ),
    "wide, vLLM tp 4, 8 ranks": (NODE, QWEN, {"engine": "vllm", "tp": 4}, {}),
    "wide, vLLM tp 2, two nodes of 8": ({"nodes": NODE["nodes"] * 2}, QWEN, {"engine": "vllm", "tp": 2}, {}),
    "wide, larger buckets": (NODE, QWEN, {"engine": "vllm"}, {"sync": {"bucket_mb": 2000}}),
}


SLOW = ("wide, vLLM tp 2, two nodes of 8", "wide, larger buckets", "hybrid-engine", "rollout-vllm")
"""Cases of `make test-all`."""


def params(names: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in names]


@pytest.mark.parametrize("name", params(ONCE_BLOCKED))
def test_batches_pass_and_single_messages_block(name: str) -> None:
    cluster, init, rollout, settings = ONCE_BLOCKED[name]
    calls = calls_of(plan_of(cluster, init, rollout, **settings))
    assert find_block(calls, lower_first)
    assert not find_block(calls)


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    """A rank has one communicator of all ranks and one of syncs, instead of seven groups and as many pairs of ranks."""
    plan = plan_of(NODE, QWEN, {"engine": "vllm"})
    own = [group for group in plan.groups if 0 in group.ranks]
    assert len(own) == 7 and plan.communicators(0) == 2


LARGE = [path.stem for path in sorted(CONFIGS.glob("*.yaml")) if "runs/quickstart" not in path.read_text()]


@pytest.mark.parametrize("name", params(LARGE))
def test_no_config_blocks(name: str) -> None:
    spec = load_spec(str(CONFIGS / f"{name}.yaml"), ("steps=2", "sync.bucket_mb=1000"))
    assert not find_block(calls_of(make_plan(spec)))


@pytest.mark.full
def test_no_random_plan_blocks() -> None:
    for plan in valid_specs(2000, seed=5).plans:
        assert not find_block(calls_of(plan))
