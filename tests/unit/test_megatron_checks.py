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


def critic(**changes: Any) -> tuple[str, str]:
    """Overrides for a critic on Megatron, its config with ``changes``."""
    init = ", ".join(f"{key}: {value}" for key, value in {**LLAMA, **changes}.items())
    return CRITIC, f"models.critic.init={{{init}}}"


def test_a_shadow_that_generates_needs_another_engine() -> None:
    assert "actor.rollout" in plan_of(SIX, 4, "models.actor.engine=megatron", VLLM).placement


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
    assert [plan.placement[name].layout.dims.pp for name in ("critic", "critic.shadow")] == [2, 1]


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
