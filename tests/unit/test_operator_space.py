"""The search for a placement of each operator: what it finds is a YAML that plans, with the seconds that it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest
from small_runs import spec_of

from flexrlhf.cli.app import app
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError
from flexrlhf.guideline.advice.advise import advise
from flexrlhf.guideline.advice.operator_space import (
    OperatorAdvice,
    OperatorSpace,
    advise_operators,
    make_operator_space,
)
from flexrlhf.guideline.costs.analytic import AnalyticCosts
from flexrlhf.guideline.search.evaluate import evaluate
from flexrlhf.guideline.search.problem import Assignment, Choice, LinkEnd, SearchSync, SearchTask, device_bytes
from flexrlhf.placement.layout import Layout
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.strategies.instructions import Release, Sync

LLAMA_7B = (
    "{model_type: llama, vocab_size: 32000, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, "
    "num_attention_heads: 32}"
)
SETTINGS = (
    *(f"models.{role}.init={LLAMA_7B}" for role in ("actor", "reward")),
    *(f"models.{role}.dtype=bfloat16" for role in ("actor", "critic", "ref", "reward")),
    *(f"models.{role}.activation_checkpointing=true" for role in ("actor", "critic")),
    "algorithm.prompts_per_step=256",
    "algorithm.num_mini_batches=8",
    "data.max_prompt_tokens=256",
    "data.max_response_tokens=256",
    "cluster={nodes: [{devices: 8, class: A100-80G}]}",
)


LLAMA_1B = "{model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5504, num_hidden_layers: 16}"
SMALL = (
    *(f"models.{role}.init={LLAMA_1B}" for role in ("actor", "reward")),
    *("models.all.dtype=bfloat16", "models.all.tp=1", "rollout.tp=1"),
    *("data.max_prompt_tokens=256", "data.max_response_tokens=2048"),
    "cluster={nodes: [{devices: 8, class: A100-80G}]}",
)
OF_64 = "prompts_per_step: 64, num_mini_batches: 4"
PPO, GRPO = f"algorithm={{name: ppo, {OF_64}}}", f"algorithm={{name: grpo, samples_per_prompt: 4, {OF_64}}}"


def large_spec(*overrides: str) -> Spec:
    return spec_of(None, 8, *SETTINGS, *overrides)


TRANSFORMERS, LAG = "rollout.engine=transformers", "schedule.lag=1"


@cache
def found(*overrides: str) -> OperatorAdvice:
    return advise_operators(large_spec(TRANSFORMERS, *overrides), AnalyticCosts(), None, 30.0)


@pytest.mark.parametrize("rollout", ["transformers", "vllm"])
@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_the_search_predicts_the_seconds_of_the_plan(engine: str, rollout: str) -> None:
    engines = (f"models.{role}.engine={engine}" for role in ("actor", "critic"))
    advice = found(*engines, *(["rollout.engine=vllm"] if rollout == "vllm" else []))
    assert advice.result.is_feasible
    assert advice.simulation.seconds == pytest.approx(advice.result.seconds, rel=0.02)


@pytest.mark.parametrize("late", [(LAG,), ("sync.every=2",), (LAG, "rollout.engine=vllm")])
def test_with_older_weights_shadows_are_searched_on_devices_that_train_nothing(late: tuple[str, ...]) -> None:
    advice = advise_operators(large_spec(TRANSFORMERS, *late), AnalyticCosts(), None, 1.0)
    plan, entries = advice.plan, advice.spec.placement
    assert isinstance(entries, PlacementMap) and entries.operators is not None
    shadows = {"generate", "values"} | ({"logprobs"} if len(late) == 1 else set())
    assert {name for name, entry in entries.operators.items() if entry.shadow} == shadows
    trained = {*plan.placement["actor"].ranks, *plan.placement["critic"].ranks}
    assert trained.isdisjoint(plan.placement["actor.generate"].ranks) and plan.strategy == "disaggregated"
    assert advice.simulation.seconds == pytest.approx(advice.result.seconds, rel=0.02)


def test_a_reference_of_adapters_has_no_shadow_next_to_a_rollout_engine() -> None:
    """Its forward passes need a copy that is trained: a plan refuses a shadow, and has another placement."""
    adapters = "models.actor.lora={rank: 16}"
    spec = spec_of(None, 8, *SMALL, GRPO, LAG, "rollout.engine=vllm", adapters)
    entries = advise_operators(spec, AnalyticCosts(), None, 1.0).spec.operators
    assert [name for name, entry in entries.items() if entry.shadow] == ["generate"]
    assert set(entries) == {"generate", "ref_logprobs", "scores", "train_actor"}


def test_vllm_generates_faster_than_transformers() -> None:
    assert found("rollout.engine=vllm").simulation.seconds < 0.9 * found().simulation.seconds


def test_no_placement_of_models_is_faster() -> None:
    """Without shadows and on the same engines: each is in the space, but for batch sizes, which the YAML leaves open
    there."""
    sizes = [f"models.{role}.{name}" for role in ("actor", "critic", "ref", "reward") for name in SIZES]
    fixed = [f"{key}={SIZES[key.rpartition('.')[2]]}" for key in sizes]
    best = advise(large_spec(*fixed, "schedule.lag=0", TRANSFORMERS), AnalyticCosts(), None, 30.0)
    models = min(item.seconds for item in best.feasible if not item.candidate.space.has_shadows)
    assert found(*fixed).simulation.seconds <= models * 1.02


SIZES = {"micro_batch_tokens": 8192, "generate_tokens": 65536}


def test_generation_is_placed_otherwise_than_training() -> None:
    """Training fits in shards alone, which decoding would gather for every token over PCIe."""
    plan = found("cluster={nodes: [{devices: 8, class: A40-48G}]}").plan
    generate, train = (plan.placement[plan.placement.operators[name]] for name in ("generate", "train_actor"))
    assert generate != train
    kinds = [type(x) for x in plan.schedule.instructions]
    assert Sync in kinds and Release in kinds


def test_memory_of_the_plan_is_that_of_the_devices() -> None:
    assert max(memory.peak_bytes for memory in found().plan.memories) < 80e9


@pytest.mark.parametrize(
    "settings",
    [
        (PPO, LAG, "rollout.engine=vllm"),
        (PPO, LAG, "models.actor.engine=megatron", "models.critic.engine=deepspeed"),
        (PPO, "sync.every=2"),
        (PPO, "models.actor.lora={rank: 16}"),
        (PPO, "rollout.engine=vllm", "rollout.tp=2"),
        (GRPO, "sync.every=2", "models.actor.lora={rank: 16}", "rollout.engine=vllm"),
    ],
)
def test_a_search_counts_the_bytes_of_plans(settings: tuple[str, ...]) -> None:
    """Of random placements on each device; more where calls share a copy. No copy has tensor-parallel parts, for which
    what a source packs depends on both ends."""
    spec = spec_of(None, 8, TRANSFORMERS, *SMALL, *settings)
    space, drawn = make_operator_space(spec, AnalyticCosts(), None), Random(0)
    differences = []
    for assignment in islice(_random_assignments(space, drawn), 20):
        plan = make_plan(space.spec_of(assignment))
        if not plan.offloaded:
            counted = (device_bytes(assignment, memory.rank) for memory in plan.memories)
            differences += [size - memory.peak_bytes for size, memory in zip(counted, plan.memories, strict=True)]
    assert min(differences) >= -1
    assert sum(abs(each) <= 1 for each in differences) > len(differences) / 3


def _random_assignments(space: OperatorSpace, drawn: Random) -> Iterator[Assignment]:
    """Yield placements of operators; with shadows training has the first devices."""
    problem, sketch = space.problem, space.sketch
    for _ in range(100):
        border = drawn.randrange(1, 8) if space.has_shadows else None
        chosen = []
        for part in problem.parts:
            first = space.roles.needs_trained(sketch.operators[part.name])
            meshes = [
                (start, size)
                for start, size in problem.all_meshes
                if border is None or (start + size <= border if first else start >= border)
            ]
            start, size = drawn.choice(meshes)
            options = part.options(problem.shape_of(start, size))
            chosen += [Choice(part.name, start, size, drawn.choice(options))] if options else []
        if len(chosen) == len(problem.parts):
            yield tuple(chosen)


def test_frozen_models_are_gathered_once_in_a_call_where_whole_ones_do_not_fit() -> None:
    """It is faster than to gather them for each pass, and than tensor-parallel parts; the plan fits as written."""
    models = [f"models.{role}.init={LLAMA_7B}" for role in ("actor", "reward")]
    nodes = "cluster={nodes: [{count: 4, devices: 4, class: V100-32G}]}"
    texts = ("data.max_prompt_tokens=256", "data.max_response_tokens=256", "models.all.dtype=float16")
    best, *others = (
        advise_operators(
            spec_of(None, 16, TRANSFORMERS, *models, *texts, nodes, PPO, *fixed), AnalyticCosts(), None, 1.0
        )
        for fixed in ((), *([f"models.{role}.zero={zero}" for role in ("ref", "reward")] for zero in (0, 3)))
    )
    assert all(best.simulation.seconds < 0.995 * each.simulation.seconds for each in others)
    assert {best.spec.operators[name].zero for name in ("ref_logprobs", "scores")} == {2}
    plan = make_plan(best.spec)
    assert not plan.offloaded
    assert all(memory.peak_bytes <= (plan.device_bytes(memory.rank) or 0) for memory in plan.memories)


def test_another_engine_generates_where_that_of_the_role_does_not() -> None:
    advice = found("models.actor.engine=megatron", "models.critic.engine=megatron")
    placement = advice.spec.placement
    assert isinstance(placement, PlacementMap) and placement.operators is not None
    assert placement.operators["generate"].engine == "torch"
    assert placement.operators["train_actor"].engine is None
    assert advice.plan.placement["actor"].engine == "megatron"


def test_a_copy_that_trains_is_not_filled() -> None:
    space = make_operator_space(large_spec(TRANSFORMERS), AnalyticCosts(), None)
    problem = space.problem
    sync = next(call for call in problem.calls if isinstance(call, SearchSync) and call.to == "generate")
    shape = problem.shape_of(0, 8)
    parts = {part.name: part for part in problem.parts}
    ends = [[LinkEnd(shape, option.layout) for option in parts[name].options(shape)] for name in (sync.task, sync.to)]
    for source in ends[0]:
        for to in ends[1]:
            assert (sync.seconds(source, to, "same") == 0) == (source.layout == to.layout)


def test_a_refill_is_searched_right_before_the_first_call_of_its_copy() -> None:
    """A plan may have it earlier, where the ranks of the copy have nothing to do before."""
    calls = make_operator_space(large_spec(TRANSFORMERS), AnalyticCosts(), None).problem.calls
    following = {before.to: after for before, after in pairwise(calls) if isinstance(before, SearchSync)}
    assert following and all(isinstance(task, SearchTask) and task.part == part for part, task in following.items())


def test_operators_that_share_a_layout_share_a_copy_in_the_plan() -> None:
    space = make_operator_space(large_spec(TRANSFORMERS), AnalyticCosts(), None)
    result = found().result
    chosen = {choice.part: choice for choice in result.assignment}
    alike = replace(chosen["train_actor"], part="generate")
    option = next(
        each
        for part in space.problem.parts
        if part.name == "generate"
        for each in part.options(space.problem.shape_of(alike.start, alike.size))
        if each.layout == alike.option.layout
    )
    assignment = tuple(replace(alike, option=option) if c.part == "generate" else c for c in result.assignment)
    plan = make_plan(space.spec_of(assignment))
    assert plan.placement.operators["generate"] == "actor"
    assert isinstance(plan.placement["actor"].layout, Layout)
    assert evaluate(space.problem, assignment) >= result.bound * (1 - 1e-9)


def test_what_the_plan_refuses_is_not_found_again() -> None:
    """Sliding attention is not shared by context-parallel ranks, which are tried for long rows."""
    sliding = LLAMA_7B.replace("llama", "mistral").replace("}", ", sliding_window: 4096}")
    models = (f"models.{role}.init={sliding}" for role in ("actor", "reward"))
    advice = advise_operators(
        large_spec(TRANSFORMERS, *models, "data.max_response_tokens=8000", "algorithm.prompts_per_step=64"),
        AnalyticCosts(),
        None,
        2.0,
    )
    assert {model.layout.dims.cp for model in advice.plan.placement.models} == {1}


@pytest.mark.full
def test_what_overflows_in_the_plan_alone_is_not_written(tmp_path: Path) -> None:
    """A search counts neither loading nor resuming, for which a rank with several copies may need most."""
    output = tmp_path / "found.yaml"
    models = ["--model", "llama-3-70b", "--critic", "llama-3-8b", "--engine", "megatron"]
    devices = ["--gpus", "64", "--gpu-type", "H100-80G"]
    app(["advise", *models, *devices, "--per-operator", "-o", str(output)], standalone_mode=False)
    plan = make_plan(load_spec(output))
    assert all(memory.peak_bytes <= (plan.device_bytes(memory.rank) or 0) for memory in plan.memories)


def test_a_hybrid_engine_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.engine: torch generates on the ranks that train the actor, so its"):
        advise_operators(large_spec("rollout.engine=torch"), AnalyticCosts())


def test_models_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(UserError, match="no placement of these operators fits the devices; use more devices or larger"):
        advise_operators(large_spec("cluster={nodes: [{devices: 1, class: V100-32G}]}"), AnalyticCosts())
    recomputing = (f"models.{role}.activation_checkpointing" for role in ("actor", "critic"))
    passes = (f"models.{role}.micro_batch_tokens=8192" for role in ("actor", "critic", "ref", "reward"))
    small = (*passes, *(f"{key}=false" for key in recomputing), "cluster={nodes: [{devices: 8, class: A100-40G}]}")
    with pytest.raises(UserError, match="one does with models.actor.activation_checkpointing: true, models.critic.act"):
        advise_operators(large_spec(*small), AnalyticCosts(), None, 2.0)


def test_recomputation_is_searched_where_the_yaml_leaves_it_open() -> None:
    """Without it nothing fits."""
    settings = (each for each in SETTINGS if "checkpointing" not in each)
    spec = spec_of(None, 8, *settings, "cluster={nodes: [{devices: 8, class: A100-40G}]}")
    plan = advise_operators(spec, AnalyticCosts(), None, 2.0).plan
    assert all(plan.placement[role].settings.activation_checkpointing for role in ("actor", "critic"))


def test_calls_have_passes_of_their_own_where_the_yaml_leaves_them_open() -> None:
    """The step is shorter than with the default in all calls; generation keeps that."""
    engines = [f"models.{role}.engine=megatron" for role in ("actor", "critic")]
    fixed = [f"models.{role}.micro_batch_tokens=8192" for role in ("actor", "critic", "ref", "reward")]
    advice = found("rollout.engine=vllm", *engines)
    assert {entry.micro_batch_tokens for entry in advice.spec.operators.values()} > {None}
    assert advice.spec.operators["generate"].micro_batch_tokens is None
    kept = found("rollout.engine=vllm", *engines, *fixed)
    assert {entry.micro_batch_tokens for entry in kept.spec.operators.values()} == {None}
    assert advice.simulation.seconds < kept.simulation.seconds


def test_the_written_yaml_gives_the_placement_that_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = Path(__file__).parents[2] / "configs" / "interleaving-8.yaml", tmp_path / "found.yaml"
    app(["advise", str(config), "--per-operator", "--seconds", "20", "-o", str(output)], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "train_critic" in printed and "s a step as simulated" in printed and f"flexrlhf plan {output}" in printed
    plan = make_plan(load_spec(output))
    assert set(plan.placement.operators) >= {"generate", "train_actor", "train_critic"}
    assert "ranks: 0-7" in output.read_text()
