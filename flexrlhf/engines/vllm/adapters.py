"""Low-rank adapters inside vLLM: stored by its layers, in the only slot of each, and added in every pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, BaseLinearLayerWithLoRA]]:
    """Yield the layers that store adapters, by their names in vLLM."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, BaseLinearLayerWithLoRA))


def stored_adapters(model: torch.nn.Module) -> list[Tensor]:
    """Return all adapters as vLLM stores them: (1, 1, rank, inputs) and (1, 1, outputs, rank), with padded ranks."""
    return [each for _, layer in adapted_layers(model) for each in (*layer.lora_a_stacked, *layer.lora_b_stacked)]


def add_in_every_pass(model: torch.nn.Module, scale: float) -> None:
    """Let every layer add ``scale`` times its adapters, whatever a request names.

    vLLM's kernels look up the adapter of every token, those for CPUs by a copy of it for each, and those for GPUs have
    no float32.
    """
    for _, layer in adapted_layers(model):
        layer.punica_wrapper.add_lora_linear = partial(_add_adapters, scale)


def _add_adapters(
    scale: float,
    outputs: Tensor,
    inputs: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    _: float,
    widths: Sequence[int],
    **__: Any,
) -> None:
    """Add the adapters of the layers that are fused to one, of which ``outputs`` has ``widths`` features each.

    The arguments are those of vLLM's method that it replaces.
    """
    for part, down, up in zip(outputs.split(list(widths), -1), a, b, strict=True):
        part.addmm_(linear(inputs, down[0, 0]), up[0, 0].t(), alpha=scale)
