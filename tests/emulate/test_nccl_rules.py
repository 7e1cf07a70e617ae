"""No rank waits for ever with NCCL: the rules on small lists, the plans that single messages block, plans of each kind
with the messages inside their layers, sessions, and large plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from emulator import Stream, emulate
from nccl_rules import Await, Call, Meet, Message, Post, Synchronize, find_block, outstanding
from random_specs import valid_specs

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import TrainPart
from flexrlhf.placement.groups import Group, GroupPurpose
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.calls import CalledStep, OperatorCall
from flexrlhf.strategies.instructions import Instruction, Run

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


def in_one_order(rank: int, messages: Sequence[Message]) -> list[Message]:
    """Single messages pair by pair, in an order of pairs that all ranks have."""
    return sorted(messages, key=lambda message: (sorted(message), message))


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


def test_ranks_make_groups_in_one_order() -> None:
    """Each waits for the other ranks of the next group on its own list, and for no rank outside of it."""
    one, two = Meet("one", (0, 1)), Meet("two", (1, 2))
    assert not find_block({0: [one], 1: [one, two], 2: [two]})
    assert find_block({0: [one, two], 1: [two, one], 2: []})


def test_a_host_that_waits_for_its_device_waits_for_receives() -> None:
    """They have not been sent: before the message rank 1 waits for a collective, which rank 0 is to begin behind it."""
    pair = Group("pair", (0, 1))
    receive, collective = Post("rows", ALL, ((1, 0),)), Post("sum", pair)
    sender = [collective, Await("sum"), receive]
    calls = {0: [receive, Synchronize(("generate", "vllm")), collective, Await("rows")], 1: sender, 2: []}
    assert not find_block(calls)
    assert "rank 0: its host at Synchronize" in find_block(calls, strict=True)
    ((_, under_way),) = outstanding(calls[0])
    assert under_way == [receive]
    # without that wait the collective is queued behind the message, where all streams share one queue
    calls[0].pop(1)
    assert not find_block(calls) and find_block(calls, strict=True)


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
    return make_plan(Spec.parse(raw))


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
    assert not find_block(calls, strict=True) and not find_block(calls, in_one_order)


def test_groups_of_the_same_ranks_share_a_communicator() -> None:
    """A rank has one communicator of all ranks and one of syncs, instead of seven groups and as many pairs of ranks."""
    plan = plan_of(NODE, QWEN, {"engine": "vllm"})
    own = [group for group in plan.groups if 0 in group.ranks]
    assert len(own) == 7 and plan.communicators(0) == 2


# --- kinds of parallelism and of schedules


DENSE = {**TINY, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128}
MIXTRAL = {**DENSE, "model_type": "mixtral", "num_local_experts": 8}
TWO_NODES = {"nodes": [{"count": 2, "devices": 4, "class": "A100-80G"}]}
LEFT, RIGHT = {"ranks": [0, 1, 2, 3]}, {"ranks": [4, 5, 6, 7]}
APART = {"placement": {"actor": LEFT, "ref": LEFT, "actor.rollout": RIGHT}}
GAME = {"path": "games.py:Game", "max_turns": 3, "turn_tokens": 4}


def grpo(actor: dict[str, Any], rollout: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """GRPO on eight ranks for two steps; with a lag for four."""
    return {
        "name": "kind",
        "steps": 4 if "schedule" in settings else 2,
        "algorithm": {"name": "grpo", "prompts_per_step": 16, "samples_per_prompt": 2, "num_mini_batches": 2},
        "models": {"actor": {"init": DENSE, **actor}},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 16, "max_response_tokens": 16},
        "reward": {"rule": "length", "target_tokens": 10},
        "cluster": {"devices": 8},
        "rollout": rollout,
        **settings,
    }


RING, ULYSSES, FULL = {"context_parallel": "ring"}, {"context_parallel": "ulysses"}, {"zero": 3}
VLLM, TORCH = {"engine": "vllm"}, {"engine": "torch"}
SPARSE = {"init": MIXTRAL}
STAGES = {"engine": "megatron", "pp": 2, "zero": 1}
KINDS = {
    "ulysses, zero 3": grpo({"cp": 2, **ULYSSES, **FULL}, VLLM),
    "ring, zero 2, vLLM tp 2": grpo({"cp": 4, **RING, "zero": 2}, {**VLLM, "tp": 2}),
    "ring, tp, torch generates": grpo({"cp": 2, "tp": 2, **RING}, TORCH),
    "ring of all ranks": grpo({"cp": 8, **RING, **FULL}, VLLM),
    "experts on all ranks": grpo({**SPARSE, "ep": 8, **FULL}, VLLM),
    "experts and replicas, vLLM tp 2": grpo({**SPARSE, "ep": 4}, {**VLLM, "tp": 2}),
    "tp of experts, torch generates": grpo({**SPARSE, "ep": 2, "tp": 2, **FULL}, TORCH),
    "experts and ring": grpo({**SPARSE, "ep": 4, "cp": 2, **RING, **FULL}, VLLM),
    "shards of each node": grpo({**FULL, "shard": "node"}, VLLM, cluster=TWO_NODES),
    "shards and experts of each node": grpo({**SPARSE, "ep": 2, **FULL, "shard": "node"}, VLLM, cluster=TWO_NODES),
    "ring in Megatron's stages": grpo({**STAGES, "cp": 2, **RING}, {**VLLM, "tp": 2}),
    "Megatron's stages apart, lag 2": grpo({**STAGES, "tp": 2}, VLLM, schedule={"lag": 2}, **APART),
    "segments": grpo(FULL, {**VLLM, "segment_tokens": 4}),
    "segments apart, lag 2": grpo(FULL, {**VLLM, "segment_tokens": 4}, schedule={"lag": 2}, **APART),
    "ring apart, lag 1": grpo({"cp": 2, **RING, **FULL}, {**VLLM, "tp": 2}, schedule={"lag": 1}, **APART),
    "experts apart, lag 1": grpo({**SPARSE, "ep": 4, **FULL}, {**VLLM, "tp": 2}, schedule={"lag": 1}, **APART),
    "two nodes, lag 1": grpo(FULL, {**VLLM, "tp": 2}, schedule={"lag": 1}, cluster=TWO_NODES, **APART),
    "turns in chunks, lag 1": grpo(FULL, VLLM, schedule={"lag": 1, "num_chunks": 2}, environment=GAME, **APART),
}


def check_waits_for_the_device(plan: Plan, calls: dict[int, list[Call]]) -> None:
    """vLLM waits for the device where it unmaps memory: nothing is under way there, in plans that fit. With a lag the
    rows of a batch are still being sent when the next one is generated, which so must not wait for the device."""
    under_way: Counter[str] = Counter()
    for own in calls.values():
        for place, posts in outstanding(own):
            under_way[place.at[0]] += bool(posts)
            # torch's watchdog leaves these to the deadlines of waits
            assert all(post.group.goes_on for post in posts)
    assert not under_way["offload"] and not under_way["reload"]
    assert bool(under_way["generate"]) == (plan.schedule.lag > 0)


@pytest.mark.parametrize("name", KINDS)
def test_no_kind_blocks(name: str) -> None:
    plan = make_plan(Spec.parse(KINDS[name]))
    calls = calls_of(plan)
    assert not find_block(calls, strict=True)
    # its groups are in use
    posted = {each.group for own in calls.values() for each in own if isinstance(each, Post)}
    purposes = {group.purpose.rpartition(" ")[0] for group in posted}
    actor = plan.placement["actor"].layout
    dims = actor.dims
    expected = {
        "cp": dims.cp > 1,
        GroupPurpose.EXPERTS: dims.ep > 1,
        GroupPurpose.SAME_EXPERTS: 1 < dims.ep < actor.of_weights.dp,
        "tp": dims.tp > 1,
    }
    assert {purpose for purpose, is_used in expected.items() if is_used} <= purposes
    check_waits_for_the_device(plan, calls)


@pytest.mark.parametrize("left_out", ["keys and values", "tokens", "gather 1", "passes"])
def test_a_rank_that_leaves_out_a_message_of_a_layer_is_found(left_out: str) -> None:
    """Such as one without rows that makes no idle pass."""
    calls = calls_of(make_plan(Spec.parse(KINDS["experts and ring"])))
    one = next(each for each in calls[3] if isinstance(each, Post) and each.key[-1] == left_out)
    calls[3].remove(one)
    assert "rank 3" in find_block(calls)


@pytest.mark.full
def test_no_random_kind_blocks() -> None:
    rng, found = Random(57), Counter[str]()
    while found.total() < 100:
        actor = {"zero": rng.choice((0, 2, 3)), "cp": rng.choice((1, 2, 4)), "ep": rng.choice((1, 2, 4, 8))}
        actor |= {"tp": rng.choice((1, 1, 2)), "init": MIXTRAL if actor["ep"] > 1 else DENSE}
        actor |= rng.choice((RING, ULYSSES))
        rollout = {**rng.choice((VLLM, TORCH)), "segment_tokens": rng.choice((None, 4))}
        settings = rng.choice(({}, {"cluster": TWO_NODES}))
        if rng.random() < 0.5:
            schedule = {"lag": rng.choice((0, 1, 2)), "num_chunks": rng.choice((1, 2))}
            settings = {**settings, "schedule": schedule, **APART, "environment": rng.choice((None, GAME))}
        try:
            plan = make_plan(Spec.parse(grpo(actor, rollout, **settings)))
        except UserError:
            continue
        assert not find_block(calls_of(plan), strict=True), (actor, rollout, settings)
        found[f"cp {actor['cp']}, ep {actor['ep']}"] += 1
    assert len(found) > 6


# --- sessions


def called(plan: Plan, is_joined: bool) -> dict[int, Stream]:
    """Work of each rank for a program that calls the operators mini-batch by mini-batch; ``is_joined``: with gradients
    of several before an optimizer step, else in the order of the graph."""
    streams: dict[int, list[tuple[int, int, Instruction]]] = {rank: [] for rank in range(plan.placement.num_ranks)}
    steps, lag, positions = plan.spec.steps, plan.schedule.lag, count()
    late = {each.operator.name for each in plan.schedule.instructions if isinstance(each, Run) and each.lag}
    calls = list(_calls(plan, is_joined))
    made: dict[int, CalledStep] = {}

    def add(step: int, instructions: Iterable[Instruction]) -> None:
        for each in instructions:
            position = next(positions)
            for rank in each.ranks:
                streams[rank].append((position, step, each))

    for newest in range(steps + lag):
        if newest < steps:
            ended = made.get(newest - lag - 1)
            for step in range(max(0, newest - lag), newest):
                add(step, made[step].overtake())
            made[newest] = CalledStep.begin(plan.graph, plan.placement, plan.batch, made.get(newest - 1), ended)
            add(newest, plan.schedule.around_calls(newest, steps, before=True))
            add(newest, chain.from_iterable(made[newest].add(each) for each in calls if each.operator not in late))
        if newest >= lag:
            step = newest - lag
            add(step, chain.from_iterable(made[step].add(each) for each in calls if each.operator in late))
            add(step, plan.schedule.around_calls(step, steps, before=False))
    return dict(streams)


def _calls(plan: Plan, is_joined: bool) -> Iterator[OperatorCall]:
    parts = [range(number, number + 1) for number in plan.batch.mini_batches]
    for operator in plan.graph.operators:
        whole = operator.kind == "generate" or operator.barrier
        kinds: tuple[TrainPart, ...] = ("loss", "backward") if is_joined and operator.kind == "train" else ()
        for part in [plan.batch.mini_batches] if whole else parts:
            yield from (OperatorCall(operator.name, part, part=kind) for kind in kinds or ("",))
        if kinds:
            yield OperatorCall(operator.name, plan.batch.mini_batches, part="step")


@pytest.mark.parametrize("is_joined", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["experts and ring", "interleaving", "apart", "lag"])
def test_no_session_blocks(name: str, is_joined: bool) -> None:
    """Also if no group of a move is made before the call that first needs it, by its ranks alone."""
    settings = {"actor": {**SPARSE, "ep": 2, "cp": 2, **RING, **FULL}, "placement": None}
    if name != "experts and ring":
        settings = {"placement": [1, 1, 0.5, 0.5] if name == "interleaving" else [0.5] * 6, "actor": {}}
    if name == "lag":
        settings |= {"schedule": {"lag": 1}, "steps": 4}
    plan = plan_of({"devices": 4}, DENSE, {}, **settings)
    plan = replace(plan, groups=tuple(group for group in plan.groups if group.purpose != "move"))
    traces = emulate(plan, "asynchronous", called(plan, is_joined), adds_groups=True)
    calls = {rank: trace.calls for rank, trace in traces.items()}
    made = [each for own in calls.values() for each in own if isinstance(each, Meet) and "move" in str(each.key)]
    assert made
    assert not find_block(calls, strict=True)


LARGE = [path.stem for path in sorted(CONFIGS.glob("*.yaml")) if "runs/quickstart" not in path.read_text()]


@pytest.mark.parametrize("name", params(LARGE))
def test_no_config_blocks(name: str) -> None:
    spec = load_spec(str(CONFIGS / f"{name}.yaml"), ("steps=2", "sync.bucket_mb=1000"))
    assert not find_block(calls_of(make_plan(spec)), strict=True)


@pytest.mark.full
def test_no_random_plan_blocks() -> None:
    for plan in valid_specs(2000, seed=5).plans:
        assert not find_block(calls_of(plan), strict=True)
