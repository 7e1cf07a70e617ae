"""Placements of operators: which share a copy, when copies exist, what they take, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from small_runs import plan_of, spec_of

from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.config.yaml_io import read_yaml
from flexrlhf.plan.changes import changes_on
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.strategies.instructions import Eval, Instruction, Release, Run, Sync

ALL, LEFT, RIGHT = {"ranks": "0-3"}, {"ranks": "0-1"}, {"ranks": "2-3"}
CALLS = ("generate", "ref_logprobs", "values", "scores", "train_actor", "train_critic")
TP = {"ranks": "0-3", "tp": 2}
SHADOW = {**RIGHT, "shadow": True}


def operators(**entries: Any) -> dict[str, Any]:
    """Every operator of PPO on all four ranks, except for ``entries``; None leaves one out."""
    given = dict.fromkeys(CALLS, ALL) | entries
    return {"operators": {name: entry for name, entry in given.items() if entry is not None}}


def apart(**entries: Any) -> dict[str, Any]:
    """Training on the left ranks and all else on the right ones, with shadows of both trained models."""
    inference = {"generate": SHADOW, "values": SHADOW, "ref_logprobs": RIGHT, "scores": RIGHT}
    return operators(**inference | {"train_actor": LEFT, "train_critic": LEFT} | entries)


def planned(*overrides: str, **entries: Any) -> Plan:
    return plan_of(operators(**entries), 4, *overrides)


def copies(plan: Plan) -> dict[str, list[str]]:
    """Operators by the copy that computes them."""
    return {
        model.name: [o for o, name in plan.placement.operators.items() if name == model.name]
        for model in plan.placement.models
    }


def names(plan: Plan) -> list[str]:
    """Operators, syncs and releases in the order of the schedule."""

    def text(instruction: Instruction) -> str:
        match instruction:
            case Run():
                return instruction.operator.name
            case Sync():
                return f"fill {instruction.destination}"
            case Release():
                return f"free {instruction.model}"
        return instruction.kind

    return [text(instruction) for instruction in plan.schedule.instructions]


# --- which operators share a copy


def test_operators_placed_alike_share_a_copy() -> None:
    plan = planned()
    assert copies(plan) == {
        "actor": ["train_actor", "generate"],
        "critic": ["train_critic", "values"],
        "ref": ["ref_logprobs"],
        "reward": ["scores"],
    }
    assert plan.strategy == "co-located"
    same = plan_of([1, 1, 1, 1], 4)
    assert plan.schedule == same.schedule and plan.groups == same.groups and plan.memories == same.memories


@pytest.mark.parametrize("entry", [RIGHT, TP, {"ranks": "0-3", "zero": 3}, {"ranks": "0-3", "engine": "deepspeed"}])
def test_another_mesh_degree_stage_or_engine_is_another_copy(entry: dict[str, Any]) -> None:
    plan = planned(generate=entry)
    assert copies(plan)["actor"] == ["train_actor"] and copies(plan)["actor.generate"] == ["generate"]
    assert plan.placement["actor"].trained and not plan.placement["actor.generate"].trained


def test_operators_that_share_a_copy_have_passes_of_their_own() -> None:
    rows = "algorithm.prompts_per_step=32"
    plan, alone = planned(rows, values={**ALL, "micro_batch_tokens": 48}), planned(rows)
    assert copies(plan) == copies(alone)
    runs = [each for each in plan.schedule.instructions if isinstance(each, Run)]
    assert {run.operator.name: run.tokens for run in runs if run.tokens} == {"values": 48}
    assert "values in passes of 48 tokens" in format_plan(plan)
    small, large = ({phase.label: phase.part_bytes for phase in each.memory(0).phases} for each in (plan, alone))
    assert {label for label in large if small[label] < large[label]} == {"forward on critic"}
    (changed,) = [each for each in changes_on(plan, 0) if each.setting.startswith("placement")]
    assert changed.text == "placement.operators.values.micro_batch_tokens=24"
    assert make_plan(plan.spec.with_settings({changed.setting: changed.value})).placement.pass_tokens == {"values": 24}


def test_settings_that_an_entry_lacks_are_those_of_the_role() -> None:
    plan = planned("models.actor.zero=3", generate={"ranks": "0-3", "zero": 0, "tp": 2})
    assert plan.placement["actor"].settings.zero == 3
    copy = plan.placement["actor.generate"].settings
    assert (copy.zero, copy.tp, copy.engine) == (0, 2, "torch")
    other = planned("models.actor.engine=megatron", "models.actor.tp=2", generate={"ranks": "0-3", "engine": "torch"})
    assert other.placement["actor.generate"].settings.tp == 2


def test_further_copies_are_called_as_their_first_operator() -> None:
    algorithm = "algorithm={name: remax, prompts_per_step: 8}"
    entries: dict[str, Any] = dict.fromkeys(
        ("generate", "greedy", "logprobs", "ref_logprobs", "scores", "greedy_scores", "train_actor"), ALL
    )
    entries |= {"generate": TP, "greedy": TP, "greedy_scores": RIGHT}
    plan = plan_of({"operators": entries}, 4, algorithm, "rollout.logprobs=recompute")
    assert copies(plan) == {
        "actor": ["train_actor", "logprobs"],
        "actor.generate": ["generate", "greedy"],
        "ref": ["ref_logprobs"],
        "reward": ["scores"],
        "reward.greedy_scores": ["greedy_scores"],
    }


def test_what_most_steps_skip_runs_on_the_copy_that_trains() -> None:
    """Without an entry; it then compares what the copy has sampled with the trained weights themselves."""
    plan = planned(generate=TP)
    (check,) = [x for x in plan.schedule.instructions if isinstance(x, Run) and x.operator.name == "computed_logprobs"]
    assert check.model == "actor"
    own = planned(generate=TP, computed_logprobs=RIGHT)
    assert copies(own)["actor.computed_logprobs"] == ["computed_logprobs"]


# --- when copies exist


def test_a_copy_exists_from_right_before_its_first_call_to_its_last_one() -> None:
    order = names(planned(generate=TP, values=LEFT))
    assert order[:3] == ["fill actor.generate", "generate", "free actor.generate"]
    place = order.index("values")
    assert order[place - 1 : place + 2] == ["fill critic.values", "values", "free critic.values"]
    assert order.count("fill actor.generate") == order.count("free actor.generate") == 1


def test_chunks_share_one_filling() -> None:
    order = names(planned("algorithm.num_mini_batches=4", "schedule.num_chunks=4", generate=TP))
    assert order.count("generate") == 4 and order.count("fill actor.generate") == 1
    assert order.index("free actor.generate") > max(i for i, name in enumerate(order) if name == "generate")


def test_an_evaluation_fills_copies_with_the_weights_that_the_step_ends_with() -> None:
    plan = planned("eval={path: rows.jsonl, every: 2}", generate=TP)
    instructions = plan.schedule.instructions
    (place,) = [i for i, x in enumerate(instructions) if isinstance(x, Eval)]
    before, after = instructions[place - 1], instructions[place + 1]
    assert isinstance(before, Sync) and before.after_training and before.refills
    assert isinstance(after, Release) and after.model == "actor.generate"
    for each in (before, after):
        assert [each.due(step, 3) for step in range(3)] == [False, True, True]
    first = next(x for x in instructions if isinstance(x, Sync))
    assert not first.after_training


def test_with_adapters_the_base_weights_stay() -> None:
    """A Sync brings the adapters alone, so there is nothing to free the rest for."""
    plan = planned("models.actor.lora={}", generate=RIGHT)
    assert "fill actor.generate" in names(plan) and "free actor.generate" not in names(plan)
    sync = next(x for x in plan.schedule.instructions if isinstance(x, Sync))
    assert not sync.refills


# --- memory


def test_a_copy_takes_memory_only_while_it_exists() -> None:
    plan, alone = planned(generate=TP), planned()
    weights = plan.state(plan.placement["actor.generate"], 0)
    assert weights is not None and weights.offloaded == 0
    found, expected = ({phase.label: phase.states for phase in each.memory(0).phases} for each in (plan, alone))
    for label in ("train on actor", "train on critic", "forward on ref", "forward on reward"):
        assert found[label] == expected[label]
    assert found["generate on actor.generate"] == expected["generate on actor"] + weights.resting
    assert found["sync to actor.generate"] == expected["generate on actor"] + weights.resting
    assert plan.memory(0).host_bytes == alone.memory(0).host_bytes


def test_two_copies_that_follow_each_other_do_not_add_up() -> None:
    plan = planned(generate=TP, values=LEFT)
    states = {name: plan.state(plan.placement[name], 0) for name in ("actor.generate", "critic.values")}
    resting = sum(state.resting for model in plan.placement.on_rank(0) if (state := plan.state(model, 0)) is not None)
    both = [state.resting for state in states.values() if state is not None]
    phases = {phase.label: phase.states for phase in plan.memory(0).phases}
    assert phases["generate on actor.generate"] == resting - both[1]
    assert phases["forward on critic.values"] == resting - both[0]


# --- what a user writes and reads


@pytest.mark.parametrize(
    ("text", "ranks"), [("0-3", (0, 1, 2, 3)), ("2", (2,)), ("0-1, 3", (0, 1, 3)), ([0, 2], (0, 2))]
)
def test_ranks_are_a_list_or_spans(text: object, ranks: tuple[int, ...]) -> None:
    assert planned(scores={"ranks": text}).placement["reward"].ranks == ranks
    assert (
        plan_of(dict.fromkeys(("actor", "critic", "ref"), 1) | {"reward": {"ranks": text}}, 4).placement["reward"].ranks
        == ranks
    )


def test_a_ratio_is_packed_as_those_of_models_are() -> None:
    plan = plan_of({"operators": dict.fromkeys(CALLS, 1) | {"scores": 0.5, "ref_logprobs": 0.5}}, 4)
    assert plan.placement["ref"].ranks == (0, 1) and plan.placement["reward"].ranks == (2, 3)
    assert plan.strategy == "interleaving"


@pytest.mark.parametrize("short", [True, False])
def test_the_resolved_yaml_gives_the_same_placement(short: bool) -> None:
    spec = spec_of(operators(generate=TP, values={"ranks": [0, 1], "zero": 3}), 4)
    text = spec.dump(short=short)
    again = Spec.parse(read_yaml(text))
    assert again.placement == spec.placement
    assert isinstance(again.placement, PlacementMap) and again.placement.operators is not None


# --- copies that a rollout engine generates with, and shadows


def test_a_rollout_engine_is_filled_for_its_calls_and_freed_with_its_cache() -> None:
    plan = planned("rollout={engine: vllm, logprobs: reuse, tp: 4}", generate=TP)
    copy = plan.placement["actor.generate"]
    assert (copy.engine, copy.layout.dims.tp, copy.is_transient) == ("vllm", 2, True)
    assert names(plan)[:3] == ["fill actor.generate", "generate", "free actor.generate"]
    state, phases = plan.state(copy, 0), {phase.label: phase.states for phase in plan.memory(0).phases}
    assert state is not None and state.cache and phases["forward on ref"] == phases["forward on reward"]
    cached = phases["generate on actor.generate"] - phases["sync to actor.generate"]
    assert cached == state.cache, "a cache is allocated before it is used"
    assert phases["generate on actor.generate"] == phases["forward on ref"] + state.resting


def test_two_generations_share_a_rollout_engine_or_have_ranks_of_their_own() -> None:
    settings = ("algorithm={name: remax, prompts_per_step: 8}", "rollout={engine: vllm, logprobs: reuse}")
    calls = ("generate", "greedy", "ref_logprobs", "scores", "greedy_scores", "train_actor")
    entries: dict[str, Any] = dict.fromkeys(calls, ALL)
    assert copies(plan_of({"operators": entries}, 4, *settings))["actor.generate"] == ["generate", "greedy"]
    apart = plan_of({"operators": entries | {"generate": LEFT, "greedy": RIGHT}}, 4, *settings)
    assert copies(apart)["actor.generate"] == ["generate"] and copies(apart)["actor.greedy"] == ["greedy"]
    assert "generate with greedy" in format_plan(apart)


@pytest.mark.parametrize("schedule", ["schedule.lag=1", "sync.every=2", "schedule={num_chunks: 2}"])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_operators_placed_as_six_models_have_their_schedule(schedule: str, engine: str) -> None:
    """But for the names of copies, and the order in which instructions of other ranks stand."""
    algorithm = ("algorithm.num_mini_batches=2", "algorithm.whiten=mini_batch")
    settings = (*algorithm, f"rollout={{engine: {engine}, logprobs: reuse}}", schedule)
    plan, six = plan_of(apart(), 4, *settings), plan_of([0.5] * 6, 4, *settings)
    assert plan.strategy == six.strategy == "disaggregated"
    for rank in range(4):
        found, expected = (
            [(x.kind, x.ranks, x.lag, x.chunk) for x in each.schedule.for_rank(rank)] for each in (plan, six)
        )
        assert found == expected
    assert [each.peak_bytes for each in plan.memories] == [each.peak_bytes for each in six.memories]
