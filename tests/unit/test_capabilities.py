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


# --- one setting of one model


@pytest.mark.parametrize(("engine", "stages"), [("torch", (0, 2, 3)), ("deepspeed", (0, 1, 2, 3))])
def test_a_frozen_model_may_have_any_stage_of_its_engine(engine: str, stages: tuple[int, ...]) -> None:
    """Stages that shard gradients or optimizer state have no effect on it."""
    for zero in stages:
        plan = plan_of(None, 2, f"models.ref.engine={engine}", f"models.ref.zero={zero}")
        assert plan.placement["ref"].settings.zero == zero


# --- sizes of the model


def test_tensor_parallel_needs_a_plan_of_the_family(tmp_path: Path) -> None:
    """Files contain the shapes of any architecture, but not how to shard it."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"lm_head.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match="^models.actor.tp: only llama, .* have a tensor-parallel plan in torch; use 1$"
    ):
        plan_of(None, 2, f"models.actor={{path: {tmp_path}, tp: 2}}")


def test_a_ring_that_is_written_may_lie_on_two_nodes() -> None:
    nodes = "cluster={nodes: [{count: 2, devices: 2}]}"
    plan = plan_of(None, 4, "models.actor.cp=4", "models.actor.context_parallel=ring", nodes)
    assert {(group.purpose, group.ranks) for group in plan.groups if group.purpose.endswith(" actor")} >= {
        ("cp actor", (0, 1, 2, 3)),
        ("weights actor", (0, 1, 2, 3)),
    }


EXPERTS = "{model_type: qwen3_moe, vocab_size: 64, num_hidden_layers: 1, num_experts: 6, num_experts_per_tok: 2}"
MOE = f"models.actor.init={EXPERTS}"


def test_experts_of_neighbours_are_split_and_those_of_the_others_are_copies() -> None:
    plan = plan_of(None, 4, MOE, "models.actor.ep=2", "models.critic.zero=3")
    assert {(group.purpose, group.ranks) for group in plan.groups if "experts" in group.purpose} == {
        ("experts actor", (0, 1)),
        ("experts actor", (2, 3)),
        ("same experts actor", (0, 2)),
        ("same experts actor", (1, 3)),
    }


# --- devices


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
    "override", ["models.ref={attention: flash_attention_2, dtype: float16}", "rollout.engine=vllm"]
)
def test_an_engine_or_a_kernel_where_a_class_has_it_and_on_cpu_ranks_whose_class_is_a_label(override: str) -> None:
    on_a100 = {name: {"ratio": 1, "on": "A100"} for name in ("actor", "critic", "ref")} | {"reward": 1}
    assert plan_of(on_a100, 4, MIXED, override).placement["ref"].ranks == (0, 1)
    assert plan_of(None, 2, f"{V100[:-1]}, device: cpu}}", override)


def test_only_the_devices_of_the_model_count() -> None:
    homes = {"actor": "A100", "critic": "A100", "ref": "V100", "reward": "V100"}
    pinned = {name: {"ratio": 1, "on": home} for name, home in homes.items()}
    plan = plan_of(pinned, 4, MIXED, "models.actor.dtype=bfloat16", "models.ref.dtype=float16")
    assert plan.placement["ref"].ranks == (2, 3)


@pytest.mark.parametrize("settings", ["{engine: deepspeed, zero: 2, dtype: bfloat16}", "{dtype: float16}"])
def test_other_types_go_with_the_cpu(settings: str) -> None:
    plan = plan_of(None, 2, f"models.critic={settings}")
    check_device(plan.placement, plan.shapes, "cpu")


# --- kernels


def test_kernels_of_torch_or_of_attention_without_a_window_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("flash_attn", "liger_kernel"))
    for settings in (("attention=flash_attention_2", "dtype=bfloat16"), ("attention=eager", "compile=true")):
        check_packages(plan_of(None, 2, *(f"models.actor.{setting}" for setting in settings)).placement)


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


def test_a_run_needs_the_packages_of_its_own_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("deepspeed", "peft", "vllm"))
    check_packages(plan_of(None, 2).placement)


def test_planning_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "find_spec", lacking("deepspeed", "peft"))
    assert isinstance(plan_of(None, 2, DEEPSPEED, *LORA), Plan)


# --- the table of engines


@pytest.mark.parametrize("facts", EngineFacts.all_engines(), ids=lambda facts: facts.name)
def test_every_engine_has_a_constructor_with_all_methods(facts: EngineFacts) -> None:
    module, _, name = facts.constructor.partition(":")
    contract = {
        method.name
        for method in _class(Engine.__module__, Engine.__name__).body
        # others have a default
        if isinstance(method, ast.FunctionDef)
        and not method.name.startswith("_")
        and ast.unparse(method.body[-1]) == "..."
    }
    assert "generate" in contract and contract <= _defined(module, name)
    assert facts.kinds and 0 in facts.zero


def _defined(module: str, name: str) -> set[str]:
    """Return the names that the source of a class and its bases defines, except the contract's."""
    if name == Engine.__name__:
        return set()
    found = _class(module, name)
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(each) for node in found.body if isinstance(node, ast.Assign) for each in node.targets}
    return names.union(*(_defined(module, ast.unparse(base)) for base in found.bases))


def _class(module: str, name: str) -> ast.ClassDef:
    """Return the source of a class, found through imports of the package; others need not be installed."""
    path = Path(flexrlhf.__file__).parent.joinpath(*module.split(".")[1:])
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _class(node.module, name)
    raise AssertionError(f"no class {name} in {module}")


def test_engines_that_generate_have_settings_of_rollout() -> None:
    fields = RolloutSpec.model_fields
    generate = {facts.name for facts in EngineFacts.all_engines() if facts.rollout_settings}
    assert set(get_args(fields["engine"].annotation)) == {"auto", "transformers"} | generate
    assert {*EngineFacts.of("vllm").rollout_settings, *RolloutSpec.OF_ALL} == set(fields)
    assert all(set(facts.rollout_settings) <= set(fields) for facts in EngineFacts.all_engines())


# --- rollout engines

VLLM = "rollout.engine=vllm"
LARGE_HEADS = "models.actor.init={model_type: llama, vocab_size: 32, hidden_size: 128, num_attention_heads: 2}"


def test_a_family_known_only_from_files_has_no_rollout_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"lm_head.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="^rollout.engine: vllm supports only llama"):
        plan_of(None, 2, VLLM, f"models.actor={{path: {tmp_path}}}")


def test_only_the_model_that_generates_must_be_of_a_known_family() -> None:
    assert "actor.rollout" in plan_of(None, 2, VLLM, "models.reward.init={model_type: gpt2}").placement


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


def test_adapters_are_merged_into_an_engine() -> None:
    plan = plan_of(SIX, 2, VLLM, "models.actor.lora={}")
    assert [model.settings.lora for model in plan.placement.models if model.rollout is not None] == [None]
