"""What the Megatron engine does not support is refused at planning in one sentence with what works instead."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import pytest
from small_runs import TINY, plan_of

from flexrlhf.config.model_settings import ModelSpec, ShadowSpec
from flexrlhf.errors import UserError
from flexrlhf.plan import model_checks
from flexrlhf.plan.model_checks import check_device, check_packages
from flexrlhf.weights.families import rope_type

CRITIC, VLLM = "models.critic.engine=megatron", "rollout.engine=vllm"
SIX = [0.5] * 6
LLAMA = {**TINY, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4}


def critic(**changes: Any) -> tuple[str, str]:
    """Overrides for a critic on Megatron, its config with ``changes``."""
    init = ", ".join(f"{key}: {value}" for key, value in {**LLAMA, **changes}.items())
    return CRITIC, f"models.critic.init={{{init}}}"


def refused(placement: object, devices: int, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        plan_of(placement, devices, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("models.actor.pp=2",),
            "models.actor.pp: engine torch has no pipeline stages, found pp 2; use 1, or engine megatron",
        ),
        (
            ("models.actor.engine=megatron",),
            "models.actor.engine: engine megatron does not support generate; set rollout.engine: vllm, or use torch or "
            "deepspeed here",
        ),
        (
            ("models.actor.engine=megatron", VLLM, "eval={path: rows.jsonl}"),
            "models.actor.engine: engine megatron does not support generate, which an evaluation does on this copy; "
            "use torch or deepspeed, or remove eval",
        ),
        (
            (*critic(), "models.critic.pp=4"),
            "models.critic.pp: 4 does not divide its 6 layers; use 1, 2, 3 or 6",
        ),
        (
            (*critic(num_key_value_heads=2), "models.critic.tp=4"),
            "models.critic.tp: 4 does not divide its 4 heads, 2 key-value heads and 16 MLP features; use 1 or 2",
        ),
        (
            (*critic(vocab_size=34), "models.critic.tp=4"),
            "models.critic.tp: 4 does not divide its vocabulary of 34, which is not padded here; use 1 or 2",
        ),
        (
            (CRITIC, "models.critic.init={model_type: gpt2}"),
            "models.critic.engine: megatron maps llama, mistral, qwen2, qwen3, mixtral, qwen3_moe models, found an "
            "unknown family; use engine torch or deepspeed",
        ),
        (
            critic(model_type="gemma"),
            "models.critic.engine: megatron maps llama, mistral, qwen2, qwen3, mixtral, qwen3_moe models, found an "
            "unknown family; use engine torch or deepspeed",
        ),
        (
            (*critic(**EXPERTS), "models.critic.lora={targets: [q_proj, down_proj]}"),
            "models.critic.lora: megatron has no adapters of experts, found targets down_proj; use targets of "
            "attention, or engine torch or deepspeed",
        ),
        (
            (*critic(**EXPERTS), "models.critic.router_z_loss_coef=0.1"),
            "models.critic.router_z_loss_coef: engine megatron does not count tokens of experts, found 0.1; use "
            "0, or engine torch or deepspeed",
        ),
        (
            critic(model_type="mistral", sliding_window=8),
            "models.critic.engine: megatron has no sliding attention, of 8 tokens in this model, whose texts have up "
            "to 12; use engine torch or deepspeed",
        ),
        (
            critic(attention_bias="true"),
            "models.critic.engine: megatron has no biases in attention (attention_bias); use engine torch or deepspeed",
        ),
        (
            critic(mlp_bias="true"),
            "models.critic.engine: megatron has no biases in MLPs (mlp_bias); use engine torch or deepspeed",
        ),
        (
            critic(rope_scaling="{rope_type: yarn, factor: 4.0}"),
            "models.critic.engine: megatron has no rotary embeddings of type yarn, only default, linear or llama3; use "
            "engine torch or deepspeed",
        ),
        (
            critic(hidden_act="gelu"),
            "models.critic.engine: megatron has no MLPs with gelu, only silu; use engine torch or deepspeed",
        ),
        (
            (*critic(), "models.critic.dtype=float16"),
            "models.critic.dtype: megatron computes in bfloat16 and float32 here, found float16; use bfloat16, or "
            "engine torch",
        ),
        (
            (*critic(), "models.critic.zero=3"),
            "models.critic.zero: engine megatron has no stage 3; use 0 or 1, or engine torch or deepspeed",
        ),
        (
            (*critic(), "models.critic.zero=1", "models.critic.optimizer.name=sgd"),
            "models.critic.zero: 1 of engine megatron has no sgd; use 0, optimizer.name adamw, or engine deepspeed",
        ),
        (
            (*critic(), "models.critic.offload_optimizer=true"),
            "models.critic.offload_optimizer: engine megatron has none, found true; use false, or engine deepspeed "
            "with zero 1",
        ),
        (
            (*critic(), "models.critic.offload_activations=true"),
            "models.critic.offload_activations: engine megatron has none, found true; use false, or engine torch or "
            "deepspeed with activation_checkpointing true",
        ),
        (
            (*critic(), "models.critic.tiled_mlp=true"),
            "models.critic.tiled_mlp: engine megatron has none, found true; use false, or engine torch or deepspeed",
        ),
        (
            (*critic(), "models.critic.liger=true"),
            "models.critic.liger: engine megatron has none, found true; use false, or engine torch or deepspeed",
        ),
        (
            (*critic(), "models.critic.attention=eager"),
            "models.critic.attention: engine megatron has attention of its own, found eager; use auto, or engine torch "
            "or deepspeed",
        ),
        (
            (*critic(), "models.critic.config={optimizer: 1}"),
            "models.critic.config: engine megatron has no settings of its own; use {}, or engine deepspeed",
        ),
        (
            ("algorithm.name=ac-share", VLLM, "models.actor.engine=megatron"),
            "models.actor.engine: megatron puts one head on a trunk, and actor has policy and values on one; use "
            "torch or deepspeed, or a separate critic",
        ),
    ],
)
def test_what_megatron_has_not_is_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    assert refused(None, 4, *overrides) == sentence


def test_a_shadow_that_generates_needs_another_engine() -> None:
    message = refused(SIX, 4, "models.actor.engine=megatron")
    assert message.startswith("models.actor.shadow.engine: engine megatron does not support generate; set rollout")
    assert "actor.rollout" in plan_of(SIX, 4, "models.actor.engine=megatron", VLLM).placement


def test_stages_divide_the_devices() -> None:
    assert refused(SIX, 4, *critic(), "models.critic.pp=4", "models.critic.shadow.engine=torch") == (
        "models.critic.pp: 4 does not divide the 2 devices of critic; use 1 or 2"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (*critic(), "models.critic.pp=2", "models.critic.tp=2"),
        (*critic(), "models.critic.pp=2", "models.critic.zero=1", "models.critic.dtype=bfloat16"),
        critic(model_type="qwen2"),
        critic(model_type="qwen3", head_dim=2),
        critic(model_type="mistral", sliding_window=12),
        critic(rope_scaling="{rope_type: llama3, factor: 8.0}"),
        ("models.reward.engine=megatron", "models.ref.engine=megatron"),
    ],
)
def test_what_megatron_has_is_planned(overrides: tuple[str, ...]) -> None:
    assert "megatron" in {model.engine for model in plan_of(None, 4, *overrides).placement.models}


def test_a_shadow_of_another_engine_has_one_stage() -> None:
    critic = ModelSpec(engine="megatron", pp=2, tp=2, zero=1)
    assert (critic.of_shadow.pp, critic.of_shadow.tp) == (2, 2)
    other = critic.model_copy(update={"shadow": ShadowSpec(engine="torch")}).of_shadow
    assert (other.pp, other.tp) == (1, 2)
    staged = ModelSpec(shadow=ShadowSpec(engine="megatron", pp=2)).of_shadow
    assert (staged.engine, staged.pp) == ("megatron", 2)


def test_the_shadow_of_a_pipeline_is_planned_on_another_engine() -> None:
    plan = plan_of(SIX, 8, *critic(), "models.critic.pp=2", "models.critic.shadow.engine=torch")
    assert [plan.placement[name].layout.pp for name in ("critic", "critic.shadow")] == [2, 1]


def with_or_without(module: str, there: bool) -> Callable[[str], ModuleSpec | None]:
    def found(name: str) -> ModuleSpec | None:
        return (ModuleSpec(name, None) if there else None) if name == module else find_spec(name)

    return found


def test_cpu_ranks_need_what_stands_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(None, 2, *critic())
    check_device(plan.placement, plan.shapes, "cuda")
    monkeypatch.setattr(model_checks, "find_spec", with_or_without("megatron_cpu", there=True))
    check_device(plan.placement, plan.shapes, "cpu")
    monkeypatch.setattr(model_checks, "find_spec", with_or_without("megatron_cpu", there=False))
    with pytest.raises(UserError) as caught:
        check_device(plan.placement, plan.shapes, "cpu")
    assert str(caught.value) == (
        "models.critic.engine: megatron runs on GPUs; on CPUs it needs the module megatron_cpu of this repository's "
        "tests/megatron_on_cpu on PYTHONPATH; use torch or deepspeed"
    )


@pytest.mark.parametrize("has_parent", [True, False])
def test_a_missing_megatron_names_the_extra(has_parent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> ModuleSpec | None:
        if name == "megatron.core" and not has_parent:
            raise ModuleNotFoundError("No module named 'megatron'", name="megatron")
        return None if name == "megatron.core" else find_spec(name)

    monkeypatch.setattr(model_checks, "find_spec", found)
    with pytest.raises(UserError) as caught:
        check_packages(plan_of(None, 2, *critic()).placement)
    assert str(caught.value) == (
        "models.critic: engine megatron needs the package megatron.core, which is not installed; pip install "
        "'flexrlhf[megatron]'"
    )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "default"),
        ({"rope_scaling": None}, "default"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "default"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "default of a part of each head"),
    ],
)
def test_the_type_of_rotary_embeddings_is_that_of_transformers(config: dict[str, Any], name: str) -> None:
    assert rope_type(config) == name
