"""Settings and models that the Megatron engine supports, checked before a run. Pure."""

from __future__ import annotations

from importlib.util import find_spec

from flexrlhf.config.model_names import LLAMA_LIKE
from flexrlhf.errors import UserError, either
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.shapes import ModelShape

ENGINE = "megatron"
ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary angles that the engine computes; models with others compute them as transformers does, in other engines."""
ACTIVATION = "silu"
CPU_MODULE = "megatron_cpu"
"""Stands in for CUDA on ranks without a GPU; a part of the tests."""
_OTHERS = "engine torch or deepspeed"


def check_megatron_settings(model: PlacedModel) -> None:
    """Raise UserError for settings that the engine does not have."""
    settings = model.settings
    if settings.dtype == "float16":
        raise UserError(
            f"{model.key('dtype')}: megatron computes in bfloat16 and float32 here, found float16; use bfloat16, or "
            f"{_OTHERS}"
        )
    if settings.attention != "sdpa":
        raise UserError(
            f"{model.key('attention')}: engine megatron has sdpa alone, found {settings.attention}; use sdpa, or "
            f"{_OTHERS}"
        )
    for name in ("liger", "compile"):
        if getattr(settings, name):
            raise UserError(f"{model.key(name)}: engine megatron has none, found true; use false, or {_OTHERS}")
    if model.trained and settings.zero == 1 and settings.optimizer.name != "adamw":
        raise UserError(
            f"{model.key('zero')}: 1, Megatron's distributed optimizer, has no {settings.optimizer.name}; use 0, or "
            f"optimizer.name adamw"
        )
    if model.head == "both":
        raise UserError(
            f"{model.key('engine')}: megatron puts one head on a trunk, and {model.role} has policy and values on one; "
            f"use {_OTHERS}, or a separate critic"
        )


def check_megatron_model(model: PlacedModel, shape: ModelShape | None, longest: int) -> None:
    """Raise UserError for a model that the engine does not map. ``longest``: tokens of a text that it reads."""
    if shape is None or shape.sizes is None or shape.sizes.family not in LLAMA_LIKE:
        found = "an unknown family" if shape is None or shape.sizes is None else shape.sizes.family
        raise UserError(
            f"{model.key('engine')}: megatron maps {', '.join(LLAMA_LIKE)} models, found {found}; use {_OTHERS}"
        )
    unmapped = _unmapped(shape, longest)
    if unmapped:
        raise UserError(f"{model.key('engine')}: megatron has no {unmapped}; use {_OTHERS}")


def _unmapped(shape: ModelShape, longest: int) -> str:
    """Return what a model of a mapped family has that the engine does not compute; empty where it computes all."""
    if shape.window is not None and shape.window < longest:
        return f"sliding attention, of {shape.window} tokens in this model, whose texts have up to {longest}"
    if shape.rope not in ROPE_TYPES:
        return f"rotary embeddings of type {shape.rope}, only {either(ROPE_TYPES)}"
    if shape.activation != ACTIVATION:
        return f"MLPs with {shape.activation}, only {ACTIVATION}"
    return _biases(shape)


def _biases(shape: ModelShape) -> str:
    """Return the biases that are not mapped, by the setting of the config; queries, keys and values of qwen2 are."""
    assert shape.sizes is not None, "the family is known"
    biases = [name for name, _ in shape.parameters if name.endswith(".bias")]
    if any(".mlp." in name for name in biases):
        return "biases in MLPs (mlp_bias)"
    if shape.sizes.family != "qwen2" and any(".self_attn." in name for name in biases):
        return "biases in attention (attention_bias)"
    return ""


def check_megatron_device(model: PlacedModel, device: str) -> None:
    """Raise UserError on CPU ranks, unless the module that stands in for CUDA is there."""
    if device == "cpu" and find_spec(CPU_MODULE) is None:
        raise UserError(
            f"{model.key('engine')}: megatron runs on GPUs; on CPUs it needs the module {CPU_MODULE} of this "
            f"repository's tests/megatron_on_cpu on PYTHONPATH; use torch or deepspeed"
        )
