"""Plans executed with one thread per rank: random specs reach the right result and none of them blocks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any, cast

import pytest
import yaml
from emulator import EmulationError, Mode, Trace, emulate
from move_rules import check_moves
from nccl_rules import find_block
from random_specs import INIT, RandomSpecs, coverage, format_table, valid_specs
from replay import Item, find_deadlock
from residency_rules import check_residency, check_sleep, least_and_most
from symbolic import Cell, Reference, inference_version, is_compared, num_evaluation_prompts, reference

from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.config.spec import Spec
from flexrlhf.placement.layout import BatchShape, Layout
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Eval, Instruction, Move, Offload, Reload, Run, Save, Sync
from flexrlhf.trainer.evaluation_batches import evaluation_shape, walk_evaluation

NUM_SPECS, BY_DEFAULT = 300, 75
"""Numbers of random specs, in total and in `make test`."""
SEED = 32
MODES: tuple[Mode, ...] = ("asynchronous", "rendezvous")
WITHIN, PER_BATCH = 1000, 100
"""Positions of an evaluation in the walk, and of one batch."""
SHORT_SECONDS = 0.5
"""For plans that are broken on purpose: they block for sure."""


@cache
def random_specs(count: int) -> RandomSpecs:
    """The first ``count`` ones."""
    return valid_specs(count, SEED)


def streams_of(plan: Plan) -> dict[int, list[Item]]:
    return {rank: list(plan.schedule.walk(rank, plan.spec.steps)) for rank in range(plan.placement.num_ranks)}


def expanded(plan: Plan) -> dict[int, list[Item]]:
    """``streams_of`` with the instructions inside evaluations one by one."""
    out: dict[int, list[Item]] = defaultdict(list)
    for rank, items in streams_of(plan).items():
        for position, step, instruction in items:
            out[rank] += _items(position * WITHIN, step, instruction, rank)
    return dict(out)


def _items(position: int, step: int, instruction: Instruction, rank: int) -> list[Item]:
    if not isinstance(instruction, Eval):
        return [(position, step, instruction)]
    shape = evaluation_shape(num_evaluation_prompts(instruction.batch.num_prompts), instruction.batch)
    inner = walk_evaluation(instruction, shape, rank)
    return [(position + PER_BATCH * len(batches) * batches.stop + place, step, each) for place, each, batches in inner]


def ppo_plan(placement: Any, devices: int, schedule: dict[str, Any] | None = None, **settings: Any) -> Plan:
    """A PPO run of 4 steps; ``settings``: models, rollout, sync_every, evaluation, the turns of its episodes, and
    settings of the algorithm."""
    turns = settings.pop("turns", None)
    sync_every, models = settings.pop("sync_every", 1), settings.pop("models", {})
    rollout, evaluation = settings.pop("rollout", {}), settings.pop("evaluation", None)
    raw = {
        "name": "fixed",
        "steps": 4,
        "algorithm": {"name": "ppo", "prompts_per_step": 8, "num_mini_batches": 4, **settings},
        "models": models | {role: {"init": INIT} | models.get(role, {}) for role in ("actor", "reward")},
        "data": {"path": "rows.jsonl"},
        "cluster": {"devices": devices},
        "placement": placement,
        "schedule": schedule or {},
        "sync": {"every": sync_every},
        "rollout": rollout,
        "environment": None if turns is None else {"path": "games.py:Game", "max_turns": turns},
        **({} if evaluation is None else {"eval": {"path": "evaluation.jsonl", "every": 2, **evaluation}}),
    }
    return make_plan(Spec.parse(raw))


def check_plan(plan: Plan) -> None:
    """The whole check of one plan: no deadlock, Moves that match their transfers, the right result in both modes."""
    deadlock = find_deadlock(expanded(plan))
    assert deadlock is None, f"deadlock:\n{deadlock and deadlock.grid()}"
    check_moves(plan)
    check_residency(plan)
    check_sleep(plan)
    traces = {mode: emulate(plan, mode) for mode in MODES}
    for each in traces.values():
        check_result(plan, each)
    block = find_block({rank: trace.calls for rank, trace in traces["asynchronous"].items()}, strict=True)
    assert not block, f"with NCCL these wait for ever:\n{block}"


def check_result(plan: Plan, traces: dict[int, Trace]) -> None:
    """Every cell that a rank saw, the final weights, and those that were evaluated and saved equal the reference's."""
    expected = reference(plan.spec)
    _check_columns(plan, traces, expected.columns)
    _check_evaluated(plan, traces, expected.evaluated)
    _check_weights(plan, traces, expected)
    for rank, trace in traces.items():
        for use, model, step, weights in trace.looks:
            versions = expected.versions[plan.placement[model].role]
            trained = step if use in ("parity", "first eval") else step + 1
            assert weights == versions[trained], f"rank {rank}, step {step}: {use} reads other weights of {model}"
        holds_actor = any(model.name == "actor" for model in plan.placement.on_rank(rank))
        compared = [step for use, _, step, _ in trace.looks if use == "parity"]
        due = [step for step in range(plan.spec.steps) if holds_actor and is_compared(plan.spec, step)]
        assert compared == due, f"rank {rank} compares the engines at steps {compared}, not at {due}"


def _check_columns(plan: Plan, traces: dict[int, Trace], expected: dict[Cell, int]) -> None:
    order = {column: i for i, column in enumerate(plan.graph.producers)}
    seen = [(cell, rank) for rank, trace in traces.items() for cell in trace.seen]
    for cell, rank in sorted(seen, key=lambda item: (item[0][0], order[item[0][1]], item[0][2], item[1])):
        step, column, row = cell
        message = f"step {step}: {column} of row {row} on rank {rank} differs from the reference"
        assert traces[rank].seen[cell] == expected[cell], message
    produced = sorted(cell for trace in traces.values() for cell in trace.produced)
    assert produced == sorted(expected), "not every cell is produced, or one is produced twice"


def _check_evaluated(plan: Plan, traces: dict[int, Trace], expected: dict[Cell, int]) -> None:
    """Every cell of evaluation rows, the last and smaller batch with them; nothing else is computed or travels."""
    for rank, trace in traces.items():
        for (step, column, row), value in trace.evaluated.items():
            place = f"evaluation of step {step}: {column} of row {row} on rank {rank}"
            assert value == expected.get((step, column, row)), f"{place} differs from the reference"
    produced = sorted(cell for trace in traces.values() for cell in trace.evaluations)
    assert produced == sorted(expected), "not every evaluation cell is produced, or one is produced twice"


def _check_weights(plan: Plan, traces: dict[int, Trace], expected: Reference) -> None:
    steps, every = plan.spec.steps, plan.spec.sync.every
    for model in plan.placement.models:
        # the copy of an operator is synced before its first call, not after training
        batches = steps - 1 if model.is_filled_for_calls else steps // every * every if model.follows else steps
        for rank in model.ranks:
            if model.is_transient:
                assert model.name not in traces[rank].weights, f"rank {rank} ends with {model.name}"
                continue
            found, right = traces[rank].weights[model.name], expected.versions[model.role][batches]
            assert found == right, f"rank {rank} ends with weights of {model.name} other than those after {batches}"


@pytest.mark.parametrize(
    "index", [pytest.param(n, marks=[pytest.mark.full] * (n >= BY_DEFAULT)) for n in range(NUM_SPECS)]
)
def test_random_spec_reaches_the_right_result(index: int) -> None:
    specs = random_specs(BY_DEFAULT if index < BY_DEFAULT else NUM_SPECS)
    try:
        check_plan(specs.plans[index])
    except AssertionError:
        print(yaml.safe_dump(specs.specs[index], sort_keys=False))
        raise


@pytest.mark.parametrize(("count", "share"), [(BY_DEFAULT, 0.1), pytest.param(NUM_SPECS, 1.0, marks=pytest.mark.full)])
def test_random_specs_cover_the_settings(count: int, share: float) -> None:
    """Each of these occurs as often as required of all specs, or ``share`` of that."""
    specs = random_specs(count)
    table = coverage(specs)
    print(f"\n{count} specs, {specs.valid_share:.0%} of all are valid; refused: {dict(specs.refused)}")
    print(format_table(table))
    required = {
        "strategy": (20, ["co-located", "interleaving", "disaggregated"]),
        "lag": (20, ["0", "1", "2 or 3"]),
        "segments": (10, ["1", "2", "3", "4", "several, lagging"]),
        "evaluation before training": (20, ["True", "False"]),
        "turns": (8, ["1", "2", "3", "4", "in chunks", "lagging", "evaluated", "of an engine"]),
        "chunks": (15, ["1", "2", "3", "4"]),
        "sync every": (20, ["1", "2", "3"]),
        "whiten": (30, ["batch", "mini_batch", "none"]),
        "epochs": (30, ["1", "2"]),
        "samples per prompt": (30, ["1", "2", "3"]),
        "placement": (10, ["none", "vector of 4", "vector of 6", "mapping", "mapping with on", "ranks"]),
        "ranks": (4, [str(n) for n in range(1, 13)]),
        "nodes": (30, ["1", "2", "3"]),
        "device classes": (30, ["1", "2"]),
        "row shares": (30, ["unequal", "equal"]),
        "replicas without rows": (30, ["some", "none"]),
        "moves": (10, ["all_gather", "all_to_all", "point_to_point"]),
        "algorithm": (5, ["ppo", "sft", "reward"]),
        "engine": (50, [f"{engine}-{zero}" for engine in ("torch", "deepspeed") for zero in (0, 2, 3)]),
        "sharded in nodes": (5, ["rows"]),
        "weights": (5, ["whole of one", "whole of tp", "rows of one", "rows of tp", "flat of one"]),
        "tensor parallel": (5, ["1", "2", "4"]),
        "context parallel": (3, ["1", "2", "4"]),
        "expert parallel": (3, ["1", "2", "4"]),
        "pipeline stages": (5, ["2 of a role", "4 of a role"]),
        "adapters": (30, ["none", "some", "shared"]),
        "syncs": (10, ["whole to whole", "whole to parts", "parts to whole", "parts to parts"]),
        "offload": (30, ["none", "some"]),
        "evaluation": (20, ["none", "with moves", "without moves"]),
        "saves": (50, ["one rank", "several ranks"]),
        "rollout": (
            15,
            ["apart, inline", "apart, child", "same ranks, asleep", "same ranks, released", "same ranks, awake"],
        ),
        "rollout tp": (8, ["1", "2"]),
        "rollout pp": (5, ["1", "2"]),
        "gate": (15, ["none", "every 1", "every 2", "at step 0"]),
        "log-probs": (10, ["forward", "generate", "train"]),
        "importance": (30, ["none", "token", "sequence"]),
        "tokens that are too stale": (8, ["none", "left out"]),
        "adapters of a rollout engine": (10, ["none", "merged", "separate"]),
        "begun ahead": (50, ["none", "some"]),
    }
    assert specs.valid_share >= 0.6
    for feature, (least, values) in required.items():
        for value in values:
            found = table[feature][value]
            assert found >= least * share, f"{feature} {value}: {found} specs, at least {least * share:g} required"


SIX = ["1/2", "1/2", "1/2", "1/2", "1/2", "1/2"]
SHARDED: dict[str, Any] = {"actor": {"zero": 3}, "critic": {"engine": "deepspeed", "zero": 3}, "ref": {"zero": 2}}
CROSSED: dict[str, Any] = {
    "actor": {"engine": "deepspeed", "zero": 3, "shadow": {"engine": "torch", "zero": 0, "tp": 2}},
    "critic": {"tp": 2, "shadow": {"tp": 1, "zero": 3}},
}
ALONE = {"actor.shadow": {"ranks": "2-3"}, "reward": {"ranks": [3]}} | {
    role: {"ranks": ranks} for role, ranks in (("actor", "0-1"), ("critic", [0]), ("ref", [1]))
}
TENSOR: dict[str, Any] = {"actor": {"tp": 2}, "critic": {"tp": 4}, "ref": {"tp": 2, "zero": 3}}
PARTS: dict[str, Any] = {"actor": {"cp": 2, "tp": 2, "zero": 3}, "critic": {"cp": 4}, "ref": {"cp": 2, "zero": 3}}
TALL: dict[str, Any] = {"init": INIT | {"num_hidden_layers": 4}, "engine": "megatron"}
STAGES: dict[str, Any] = {
    "actor": TALL | {"pp": 2, "tp": 2},
    "critic": {"engine": "megatron", "pp": 4, "zero": 1},
    "reward": TALL | {"pp": 2},
}
SCORED: dict[str, Any] = STAGES | {"actor": {"init": INIT | {"num_hidden_layers": 4}}}
STAGED: dict[str, Any] = {
    "actor": TALL | {"pp": 2, "tp": 2, "zero": 1},
    "critic": {"engine": "megatron", "pp": 4, "shadow": {"pp": 2, "tp": 2}},
    "ref": {"engine": "megatron", "pp": 4},
    "reward": {"init": INIT | {"num_hidden_layers": 4}},
}
TO_TORCH: dict[str, Any] = STAGED | {"actor": STAGED["actor"] | {"shadow": {"engine": "torch", "zero": 3, "tp": 2}}}
SHARED: dict[str, Any] = {"actor": {"lora": {}, "zero": 3}, "ref": {"share": "actor"}}
VLLM: dict[str, Any] = {"engine": "vllm", "parity": {"every": 2}}
HALVES: dict[str, Any] = VLLM | {"tp": 2}
HYBRID: dict[str, Any] = HALVES | {"engine": "torch"}
CHILD: dict[str, Any] = VLLM | {"process": "child"}
RECOMPUTE: dict[str, Any] = {"logprobs": "recompute"}
STREAM: dict[str, Any] = {"num_chunks": 4}
PAIR: dict[str, Any] = {"samples_per_prompt": 2}
THIRDS: dict[str, Any] = {"segment_tokens": 32, "max_segments": 3}
DYNAMIC: dict[str, Any] = {"name": "grpo", **PAIR, "dynamic_sampling": {"rounds": 3}}
REWARD: dict[str, Any] = {"place": "reward"}
ENDED: dict[str, Any] = THIRDS | {"groups": "as-ended"}
GROUPS: dict[str, Any] = PAIR | {"name": "grpo"}
LATE: dict[str, Any] = {"lag": 2, "num_chunks": 2}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: ppo_plan(None, 1), id="one-rank"),
        pytest.param(lambda: ppo_plan([1, 1, 1, 1], 4), id="co-located"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 2), id="algorithm-1"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 8), id="interleaving-8"),
        pytest.param(lambda: ppo_plan(["1/2"] * 4, 4, {"num_chunks": 2}, whiten="mini_batch"), id="lanes-chunked"),
        pytest.param(lambda: ppo_plan(SIX, 4), id="six-models"),
        pytest.param(lambda: ppo_plan(SIX, 4, {"num_chunks": 4}, whiten="mini_batch"), id="six-models-streaming"),
        pytest.param(lambda: ppo_plan(SIX, 4, {"lag": 1}, sync_every=3), id="six-models-lag-1-every-3"),
        pytest.param(lambda: ppo_plan(SIX, 2, {"lag": 1, "num_chunks": 2}, epochs=2), id="six-models-lag-1-chunked"),
        pytest.param(
            lambda: ppo_plan(SIX, 4, {"lag": 3, "num_chunks": 2}, sync_every=2), id="six-models-lag-3-every-2"
        ),
        pytest.param(lambda: ppo_plan([1, 1, 1, 1], 2, rollout=THIRDS, evaluation=PAIR, **PAIR), id="segments"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 4, STREAM, rollout=THIRDS | HYBRID), id="segments-hybrid"),
        pytest.param(
            lambda: ppo_plan(SIX, 4, {"lag": 3, "num_chunks": 2}, rollout=THIRDS, whiten="mini_batch", **PAIR),
            id="six-models-lag-3-segments",
        ),
        pytest.param(
            lambda: ppo_plan(SIX, 8, {"lag": 2}, sync_every=2, rollout=THIRDS | HALVES, models=STAGED),
            id="six-rollout-lag-2-segments",
        ),
        pytest.param(lambda: ppo_plan(ALONE, 4, {"lag": 2, "num_chunks": 2}), id="generation-alone-lag-2"),
        pytest.param(lambda: ppo_plan([1, "1/2", "1/2"], 2, STREAM, rollout=ENDED, **GROUPS), id="as-ended-chunks"),
        pytest.param(lambda: ppo_plan(SIX[:4], 4, {"lag": 2}, rollout=ENDED | VLLM, **GROUPS), id="as-ended-lag-2"),
        # scores of the groups are carried on the ranks of training
        pytest.param(
            lambda: ppo_plan({n: ALONE[n] for n in ALONE if n != "critic"}, 4, LATE, rollout=ENDED, **GROUPS),
            id="as-ended-alone-lag-2",
        ),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 4, models=SHARDED), id="shards"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 8, {"num_chunks": 2}, models=TENSOR), id="tensor-parallel"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 8, {"num_chunks": 2}, models=PARTS), id="context-parallel"),
        pytest.param(lambda: ppo_plan(SIX, 4, {"num_chunks": 4}, whiten="none", models=CROSSED), id="six-crossed"),
        pytest.param(lambda: ppo_plan(SIX, 8, {"lag": 1}, sync_every=2, models=CROSSED), id="six-crossed-lag-1"),
        pytest.param(lambda: ppo_plan(None, 8, rollout=HALVES, models=STAGES), id="stages"),
        pytest.param(lambda: ppo_plan(None, 8, rollout=VLLM, models=SCORED, evaluation={}), id="stages-evaluated"),
        pytest.param(lambda: ppo_plan(SIX, 8, STREAM, whiten="none", models=TO_TORCH), id="six-stages-streaming"),
        pytest.param(lambda: ppo_plan(SIX, 8, {"lag": 1}, rollout=HALVES, models=STAGED), id="six-stages-lag-1"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2"], 4, models=SHARED), id="shared-reference"),
        pytest.param(lambda: ppo_plan(SIX[:5], 4, {"lag": 1}, models=SHARED), id="shared-reference-of-a-shadow"),
        pytest.param(lambda: ppo_plan(None, 2, rollout=VLLM), id="rollout"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 4, STREAM, rollout=HALVES), id="rollout-tp-chunks"),
        pytest.param(lambda: ppo_plan(None, 4, rollout=HALVES, models=SHARDED), id="rollout-of-shards"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2"], 4, rollout=HALVES, models=SHARED), id="rollout-merged"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 4, STREAM, rollout=HYBRID), id="hybrid-chunks"),
        pytest.param(lambda: ppo_plan(None, 4, rollout=HYBRID, models=SHARDED), id="hybrid-of-shards"),
        pytest.param(lambda: ppo_plan(None, 2, importance={}), id="importance"),
        pytest.param(lambda: ppo_plan([1, 1, "1/2"], 4, **DYNAMIC), id="attempts"),
        pytest.param(lambda: ppo_plan(SIX[:4], 4, {"lag": 2}, **DYNAMIC, kl=REWARD), id="attempts-lag-2"),
        pytest.param(
            lambda: ppo_plan(SIX[:4], 4, STREAM, **DYNAMIC, rollout=CHILD, importance={}), id="attempts-child"
        ),
        pytest.param(lambda: ppo_plan([1, 1, "1/2"], 4, **DYNAMIC, rollout=THIRDS), id="replaced"),
        pytest.param(
            lambda: ppo_plan(SIX[:4], 4, {"lag": 2}, **DYNAMIC, rollout=THIRDS | VLLM, kl=REWARD), id="replaced-lag-2"
        ),
        pytest.param(lambda: ppo_plan(SIX, 4, {"lag": 1}, rollout=RECOMPUTE), id="recompute-lag-1"),
        pytest.param(lambda: ppo_plan(SIX[:5], 4, num_mini_batches=1, kl=None), id="one-pass"),
        pytest.param(
            lambda: ppo_plan(SIX, 4, {"lag": 1}, sync_every=2, num_mini_batches=1, importance={}), id="one-pass-lag-1"
        ),
        pytest.param(lambda: ppo_plan(None, 2, rollout=VLLM, num_mini_batches=1, importance={}), id="one-pass-rollout"),
        pytest.param(lambda: ppo_plan(SIX, 4, STREAM, rollout=CHILD, whiten="none"), id="six-child"),
        pytest.param(lambda: ppo_plan(SIX, 8, rollout=HALVES, sync_every=3), id="six-rollout-every-3"),
        pytest.param(lambda: ppo_plan(SIX, 4, {"lag": 1}, rollout=CHILD, importance={}), id="six-rollout-lag-1"),
        pytest.param(lambda: ppo_plan(SIX, 4, {"lag": 1}, sync_every=2, importance={}), id="six-importance-lag-1"),
        # the advantages wait for the trained copy, and so does the rejection behind them
        pytest.param(
            lambda: ppo_plan(
                SIX[:5], 4, {"lag": 1}, sync_every=2, rollout=VLLM, models=SHARED, importance={"max_staleness": 1}
            ),
            id="six-merged-too-stale",
        ),
        pytest.param(lambda: ppo_plan([1, 1, "1/2", "1/2"], 2, evaluation={}), id="evaluated"),
        pytest.param(lambda: ppo_plan(None, 2, models={"reward": {"tp": 2}}, evaluation={}), id="evaluated-gathered"),
        pytest.param(lambda: ppo_plan(SIX, 4, STREAM, evaluation=PAIR), id="six-evaluated"),
        pytest.param(lambda: ppo_plan(SIX, 4, {"lag": 1}, rollout=CHILD, evaluation=PAIR), id="six-lag-1-evaluated"),
        pytest.param(lambda: ppo_plan(SIX[:5], 4, STREAM, rollout=VLLM, models=SHARED), id="six-rollout-merged"),
        pytest.param(lambda: ppo_plan(SIX[:5], 4, {"lag": 1}, rollout=VLLM, models=SHARED), id="six-merged-lag-1"),
        pytest.param(lambda: ppo_plan(SIX, 4, LATE, turns=3, rollout=CHILD, evaluation=PAIR), id="turns-lag-2"),
        pytest.param(lambda: ppo_plan([1, "1/2", "1/2"], 4, STREAM, turns=2, rollout=HYBRID, **GROUPS), id="turns"),
    ],
)
def test_fixed_plan_reaches_the_right_result(plan: Callable[[], Plan]) -> None:
    check_plan(plan())


@pytest.mark.parametrize("placement", [[1, 1, 1, 1], [1, 1, "1/2", "1/2"]])
def test_training_of_a_chunk_waits_for_inference_with_the_same_weights(placement: list[Any]) -> None:
    """Generation uses the trained weights if there are no shadows, so no later chunk may see an update."""
    check_plan(ppo_plan(placement, 2, {"num_chunks": 4}, whiten="mini_batch"))


@pytest.mark.parametrize(
    ("lag", "every", "versions"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5, 6]),
        (1, 1, [0, 0, 1, 2, 3, 4, 5]),
        (0, 3, [0, 0, 0, 3, 3, 3, 6]),
        (1, 3, [0, 0, 0, 0, 3, 3, 3]),
        (4, 2, [0, 0, 0, 0, 0, 0, 2]),
    ],
)
def test_version_rule_of_the_reference(lag: int, every: int, versions: list[int]) -> None:
    """Batch b uses the weights after k * floor(max(0, b - lag) / k) batches."""
    assert [inference_version(batch, lag, every) for batch in range(7)] == versions


def with_instructions(plan: Plan, change: Callable[[Instruction], Instruction]) -> Plan:
    instructions = tuple(change(instruction) for instruction in plan.schedule.instructions)
    return replace(plan, schedule=replace(plan.schedule, instructions=instructions))


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_transfer_is_reported(mode: Mode) -> None:
    def drop(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Move) and "scores" in instruction.columns:
            return replace(instruction, transfers=tuple(t for t in instruction.transfers if t.column != "scores"))
        return instruction

    with pytest.raises(EmulationError, match=r"rank 0 reads scores of row 0, step 0, but neither produced nor"):
        emulate(with_instructions(ppo_plan([1, 1, "1/2", "1/2"], 2), drop), mode)


def test_a_response_goes_on_on_its_rank_however_places_are_split() -> None:
    """A prompt keeps its place, so a split that parts the places of one number moves no response."""

    class Separated(BatchShape):
        def part(self, layout: Layout, replica: int, mini_batch: int) -> range:
            return layout.slice(self.prompts(mini_batch), replica, turn=mini_batch)

    plan = ppo_plan([1, 1, 1, 1], 3, rollout=THIRDS)
    separated = replace(plan, batch=Separated(**vars(plan.batch)))
    assert separated.batch.prompts_on(*_first(plan)) != plan.batch.prompts_on(*_first(plan))
    emulate(separated, "asynchronous")


def _first(plan: Plan) -> tuple[Layout, int, range]:
    """Layout of the first operator, its second rank, and all mini-batches."""
    return plan.placement.layout_of(plan.graph.operators[0]), 1, plan.batch.mini_batches


def fields_of(plan: Plan) -> dict[str, Any]:
    """Arguments of a plan that equals ``plan``."""
    return {each.name: getattr(plan, each.name) for each in fields(plan)}


def test_rows_that_are_dropped_before_they_are_carried_on_are_reported() -> None:
    class Forgetting(Plan):
        num_steps_kept = 0

    plan = Forgetting(**fields_of(ppo_plan([1, 1, 1, 1], 2, rollout=THIRDS)))
    with pytest.raises(EmulationError, match=r"rank \d reads tokens of step 0, whose rows are dropped"):
        emulate(plan, "asynchronous")


def test_a_transfer_of_a_row_that_is_already_there_is_reported() -> None:
    def repeat(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Move):
            return replace(instruction, transfers=(*instruction.transfers, instruction.transfers[0]))
        return instruction

    plan = with_instructions(ppo_plan([1, 1, "1/2", "1/2"], 2), repeat)
    with pytest.raises(EmulationError, match=r"already has tokens of row"):
        emulate(plan, "asynchronous")
    with pytest.raises(AssertionError, match="more than once"):
        check_moves(plan)


def test_a_wrong_primitive_is_reported() -> None:
    def relabel(instruction: Instruction) -> Instruction:
        return replace(instruction, primitive="all_to_all") if isinstance(instruction, Move) else instruction

    with pytest.raises(AssertionError, match="attention_mask actor -> ref, reward says all_to_all"):
        check_moves(with_instructions(ppo_plan([1, 1, "1/2", "1/2"], 2), relabel))


def test_a_dropped_transfer_of_an_evaluation_is_reported() -> None:
    def drop(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Eval):
            return instruction
        kept = tuple(each for each in instruction.instructions if isinstance(each, Run) or "scores" not in each.columns)
        return replace(instruction, instructions=kept)

    plan = with_instructions(ppo_plan([1, 1, "1/2", "1/2"], 2, evaluation={}), drop)
    with pytest.raises(EmulationError, match=r"rank 0 at step 1, eval actor, reward on .* reads scores of row 0"):
        emulate(plan, "asynchronous")


def test_an_evaluation_that_leaves_out_a_batch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last, smaller one."""
    plan = ppo_plan([1, 1, "1/2", "1/2"], 2, evaluation={})
    monkeypatch.setattr("emulator.num_evaluation_prompts", lambda batch: batch)
    with pytest.raises(AssertionError, match="not every evaluation cell is produced"):
        check_result(plan, emulate(plan, "asynchronous"))


def test_a_wrong_sync_period_is_reported() -> None:
    def seldom(instruction: Instruction) -> Instruction:
        return replace(instruction, every=2) if isinstance(instruction, Sync) else instruction

    plan = with_instructions(ppo_plan(SIX, 2), seldom)
    with pytest.raises(AssertionError, match=r"step 1: tokens of row 0 on rank \d differs from the reference"):
        check_result(plan, emulate(plan, "asynchronous"))


class Forgetful(BatchShape):
    """Rank 1 misses the last prompt that it should have."""

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> tuple[int, ...]:
        prompts = super().prompts_on(layout, rank, mini_batches, attempt)
        return prompts[:-1] if rank == 1 else prompts


class Greedy(BatchShape):
    """Rank 1 also has the first prompt of the mini-batches, which is rank 0's."""

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> tuple[int, ...]:
        prompts = super().prompts_on(layout, rank, mini_batches, attempt)
        return (self.prompts(mini_batches[0])[0], *prompts) if rank == 1 else prompts


@pytest.mark.parametrize(
    ("shape", "message"),
    [(Forgetful, r"row \[\d+\] reaches no replica of actor"), (Greedy, r"row \[0\] reaches the reduction twice")],
)
def test_replicas_that_do_not_share_the_rows_out_exactly_are_reported(shape: type[BatchShape], message: str) -> None:
    plan = ppo_plan([1, 1, 1, 1], 2)
    with pytest.raises(EmulationError, match=message):
        emulate(replace(plan, batch=shape(**vars(plan.batch))), "asynchronous")


@pytest.mark.parametrize(
    ("purpose", "ranks", "plan"),
    [
        ("compute critic", (0, 1), lambda: ppo_plan([1, 1, 1, 1], 2)),
        ("compute critic", (1, 3), lambda: ppo_plan([1, 1, 1, 1], 4, models={"critic": {"tp": 2}})),
        ("tp actor.shadow", (2, 3), lambda: ppo_plan(SIX, 4, models=CROSSED)),
        ("gather actor", (0, 1), lambda: ppo_plan(SIX, 4, models=CROSSED)),
        ("sync critic", (0, 1, 2, 3), lambda: ppo_plan(SIX, 4, models=CROSSED)),
    ],
)
def test_a_group_that_the_plan_does_not_list_is_reported(
    purpose: str, ranks: tuple[int, ...], plan: Callable[[], Plan]
) -> None:
    made = plan()
    groups = tuple(group for group in made.groups if (group.purpose, group.ranks) != (purpose, ranks))
    assert len(groups) == len(made.groups) - 1
    with pytest.raises(EmulationError, match=re.escape(f"no group '{purpose}' of {ranks}")):
        emulate(replace(made, groups=groups), "asynchronous")


def test_deepspeed_without_a_group_of_one_rank_is_reported() -> None:
    plan = ppo_plan([1, 1, 1, 1], 2, models=SHARDED)
    groups = tuple(group for group in plan.groups if not group.alone)
    with pytest.raises(EmulationError, match=r"no group of \d alone"):
        emulate(replace(plan, groups=groups), "asynchronous")


@pytest.mark.parametrize("mode", MODES)
def test_a_sync_without_its_group_is_reported(mode: Mode) -> None:
    plan = ppo_plan(SIX, 4, models=CROSSED)
    groups = tuple(group for group in plan.groups if group.purpose != "sync actor")
    with pytest.raises(EmulationError, match=r"sync weights actor.*: no group 'sync actor' of \(0, 1, 2, 3\)"):
        emulate(replace(plan, groups=groups), mode)


def test_a_save_without_all_parts_is_reported() -> None:
    def lone(instruction: Instruction) -> Instruction:
        return replace(instruction, ranks=instruction.ranks[:1]) if isinstance(instruction, Save) else instruction

    staged = {"critic": {"engine": "megatron", "pp": 2}, "reward": {"init": TALL["init"]}}
    for models, missing in (
        ({"critic": {"zero": 3}}, "(0, 0, 1)"),
        # parts are counted in the order of the axes' table: tp, pp, then shards
        ({"critic": {"tp": 2}}, "(1, 0, 0)"),
        (staged, "(0, 1, 0)"),
    ):
        plan = with_instructions(ppo_plan([1, 1, 1, 1], 2, models=models), lone)
        with pytest.raises(EmulationError, match=re.escape(f"ranks (0,) have critic without its parts [{missing}]")):
            emulate(plan, "asynchronous")


class Askew(BatchShape):
    """Rank 1 has the rows of the next replica."""

    def prompts_on(self, layout: Layout, rank: int, mini_batches: range, attempt: int | None = None) -> tuple[int, ...]:
        return super().prompts_on(layout, 2 if rank == 1 else rank, mini_batches, attempt)


def test_tensor_parallel_ranks_with_different_rows_are_reported() -> None:
    plan = ppo_plan([1, 1, 1, 1], 4, models={role: {"tp": 2} for role in ("actor", "critic", "ref", "reward")})
    with pytest.raises(EmulationError, match=r"tp actor: ranks \(0, 1\) do not compute the same"):
        emulate(replace(plan, batch=Askew(**vars(plan.batch))), "asynchronous")


def tight_plan() -> Plan:
    """Two devices on which not all four models fit at once."""
    plan = ppo_plan([1, 1, 1, 1], 2)
    least, most = least_and_most(plan)
    assert not any(isinstance(x, Offload | Reload) for x in plan.schedule.instructions)
    tight = make_plan(plan.spec.model_copy(update={"cluster": ClusterSpec(devices=2, memory_gb=(least + most) / 2e9)}))
    assert any(isinstance(x, Offload) for x in tight.schedule.instructions)
    return tight


def without(plan: Plan, kind: type[Instruction]) -> Plan:
    kept = tuple(x for x in plan.schedule.instructions if not isinstance(x, kind))
    return replace(plan, schedule=replace(plan.schedule, instructions=kept))


def test_models_that_take_turns_on_a_device_reach_the_right_result() -> None:
    check_plan(tight_plan())


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Reload, r"\w+ waits in host memory on rank \d"), (Offload, r"\w+ is on the device already")],
)
def test_a_model_on_the_wrong_side_is_reported(kind: type[Instruction], message: str) -> None:
    plan = without(tight_plan(), kind)
    with pytest.raises(EmulationError, match=message):
        emulate(plan, "asynchronous")
    with pytest.raises(AssertionError):
        check_residency(plan)


def sleeping_plan() -> Plan:
    return ppo_plan([1, 1, 1, 1], 2, STREAM, rollout=VLLM)


def test_an_engine_that_sleeps_at_its_sync_is_reported() -> None:
    plan = without(sleeping_plan(), Reload)
    with pytest.raises(EmulationError, match=r"sync weights .*: actor.rollout waits in host memory on rank \d"):
        emulate(plan, "asynchronous")
    with pytest.raises(AssertionError, match=r"sync weights actor -> actor.rollout without \['actor.rollout'\]"):
        check_residency(plan)


def test_an_engine_that_does_not_sleep_is_reported() -> None:
    plan = without(without(sleeping_plan(), Offload), Reload)
    with pytest.raises(AssertionError, match=r"rank 0, step 0: \w+ on \w+ next to actor.rollout, which does not sleep"):
        check_sleep(plan)


def test_a_copy_that_is_not_filled_before_it_generates_is_reported() -> None:
    """The hybrid engine's: its weights were freed after the responses of the step before."""
    plan = ppo_plan([1, 1, 1, 1], 4, rollout=HYBRID)
    with pytest.raises(EmulationError, match=r"actor.rollout"):
        emulate(without(plan, Sync), "asynchronous")


def test_an_engine_that_sleeps_though_it_should_not_is_reported() -> None:
    awake = ppo_plan([1, 1, 1, 1], 2, STREAM, rollout=VLLM | {"sleep": False})
    with pytest.raises(AssertionError, match="actor.rollout does not sleep, yet"):
        check_sleep(replace(awake, schedule=sleeping_plan().schedule))


def test_an_engine_that_is_offloaded_with_responses_begun_is_reported() -> None:
    plan = sleeping_plan()
    offload, reload = (kind(ranks=(0, 1), model="actor.rollout") for kind in (Offload, Reload))
    first = next(i for i, x in enumerate(plan.schedule.instructions) if isinstance(x, Run))
    later = plan.ahead(cast(Run, plan.schedule.instructions[first]))
    instructions = list(plan.schedule.instructions)
    instructions[first + 1 : first + 1] = [offload, reload]

    class Eager(Plan):
        def ahead(self, run: Run) -> list[range]:
            return later[-(3 - (run.chunk or 0)) :] if run.operator.kind == "generate" and run.chunk != 3 else []

    eager = Eager(**{**fields_of(plan), "schedule": replace(plan.schedule, instructions=tuple(instructions))})
    with pytest.raises(EmulationError, match=r"actor.rollout has begun mini-batches \[range\(1, 2\), "):
        emulate(eager, "asynchronous")
    check_result(plan, emulate(plan, "asynchronous"))


@pytest.mark.parametrize("rollout", [VLLM, {}])
def test_log_probs_of_the_trained_copy_after_it_has_trained_are_reported(rollout: dict[str, Any]) -> None:
    plan = ppo_plan(SIX, 2, rollout=rollout, importance={})
    instructions = list(plan.schedule.instructions)
    names = [x.operator.name if isinstance(x, Run) else "" for x in instructions]
    late = instructions.pop(names.index("logprobs"))
    instructions.insert(names.index("train_actor"), late)
    moved = replace(plan, schedule=replace(plan.schedule, instructions=tuple(instructions)))
    with pytest.raises(EmulationError, match="reads logprobs of row 0, step 0, but neither"):
        emulate(moved, "asynchronous")

    def without_reading(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Run) or instruction.operator.name not in ("train_actor", "parity"):
            return instruction
        reads = tuple(name for name in instruction.operator.reads if name != "logprobs")
        return replace(instruction, operator=replace(instruction.operator, reads=reads))

    blind = with_instructions(moved, without_reading)
    with pytest.raises(AssertionError, match="step 0: logprobs of row 0 on rank 0 differs from the reference"):
        check_result(blind, emulate(blind, "asynchronous"))


def test_a_gate_that_compares_other_weights_is_reported() -> None:
    """The gate would compare every second batch, but the engine samples only every sixth with the newest weights."""

    def often(instruction: Instruction) -> Instruction:
        is_it = isinstance(instruction, Run) and instruction.operator.every > 1
        return replace(instruction, operator=replace(instruction.operator, every=2)) if is_it else instruction

    plan = ppo_plan(SIX, 2, rollout=VLLM, sync_every=3, importance={})
    check_plan(plan)
    changed = with_instructions(plan, often)
    with pytest.raises(AssertionError, match=r"rank 0 compares the engines at steps \[0, 2, 3\], not at \[0, 3\]"):
        check_result(changed, emulate(changed, "asynchronous"))


def test_a_device_that_overflows_is_reported() -> None:
    plan = replace(without(without(tight_plan(), Offload), Reload), offloaded={})
    with pytest.raises(AssertionError, match=r"rank 0, step 0: run \w+ on \w+: \d+ of \d+ bytes, with \['actor', "):
        check_residency(plan)


def swapped_streams(plan: Plan, rank: int, first: int) -> dict[int, list[Item]]:
    """Every rank's stream; ``rank`` does its items number ``first`` and ``first`` + 1 the other way round."""
    streams = streams_of(plan)
    items = streams[rank]
    items[first : first + 2] = reversed(items[first : first + 2])
    return streams


def test_two_instructions_swapped_on_one_rank_are_reported() -> None:
    plan = ppo_plan([1, 1, 1, 1], 2)
    streams = swapped_streams(plan, rank=1, first=6)
    with pytest.raises(EmulationError, match=r"(?s)blocked.*rank 0: .*run train_actor.* waits for rank 1.*rank 1: "):
        emulate(plan, "asynchronous", streams, SHORT_SECONDS)
    with pytest.raises(EmulationError, match=r"(?s)blocked.*rank 0: .*run train_actor.* waits for rank 1.*rank 1: "):
        emulate(plan, "rendezvous", streams, SHORT_SECONDS)


def test_replay_marks_the_stuck_cells_of_a_bad_schedule() -> None:
    plan = ppo_plan([1, 1, 1, 1], 2, rollout=RECOMPUTE)
    deadlock = find_deadlock(swapped_streams(plan, rank=1, first=6))
    assert deadlock is not None
    assert deadlock.grid().splitlines() == [
        "step  rank 0    rank 1",
        "0     6/8 <<    6/8 <<",
        "1     0/8       0/8",
        "2     0/8       0/8",
        "3     0/10      0/8",
        "rank 0 stands at step 0, run train_actor on actor (#6) without rank [1]",
        "rank 1 stands at step 0, run train_critic on critic (#7) without rank [0]",
    ]


def test_replay_finds_ranks_that_walk_different_lists() -> None:
    """Three ranks in a ring, each waiting for the next: no two of them disagree about order, all together do."""
    pairs = [Save(ranks=ranks, model="actor") for ranks in ((0, 1), (1, 2), (0, 2))]
    ab, bc, ca = ((position, 0, pair) for position, pair in enumerate(pairs))
    assert find_deadlock({0: [ab, ca], 1: [ab, bc], 2: [bc, ca]}) is None
    assert find_deadlock({0: [ca, ab], 1: [ab, bc], 2: [bc, ca]}) is not None


def test_replay_finds_a_rank_that_never_comes() -> None:
    lone = (0, 0, Save(ranks=(0, 1), model="actor"))
    deadlock = find_deadlock({0: [lone], 1: []})
    assert deadlock is not None and "without rank [1]" in deadlock.grid() and "rank 1 has finished" in deadlock.grid()
