"""Kernels of a model's layers that take the place of transformers' own: Liger's, and those that torch compiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flexrlhf.config.spec import ModelSpec


def attention_option(settings: ModelSpec) -> dict[str, str]:
    """Return the argument of transformers' classes; without one they take sdpa, or eager where a family lacks it."""
    return {} if settings.attention == "sdpa" else {"attn_implementation": settings.attention}


def use_kernels(model: PreTrainedModel, settings: ModelSpec) -> None:
    """Give the layers of ``model`` the kernels of its settings; parameters and their names stay as they are."""
    if settings.liger:
        _use_liger(model)
    if settings.compile:
        compile_layers(model)


def _use_liger(model: PreTrainedModel) -> None:
    """Replace norms and MLPs by Liger's, for a family that it has; log-probs have our own head already."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    with _unchanged(sys.modules[type(model).__module__]):
        _apply_liger_kernel_to_instance(
            model=model, rope=False, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )


@contextmanager
def _unchanged(module: ModuleType) -> Iterator[None]:
    """Restore the classes and functions of ``module``, which Liger also replaces for models that are made later."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(before)


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile every layer when it is first called, for rows of any number and width. ``backend``: of torch.compile."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True, backend=backend)
