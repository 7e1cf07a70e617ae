"""RMSNorm (Zhang and Sennrich 2019) on CPUs: transformers' numbers, and gradients in half the passes over memory.

Norms are little arithmetic on much memory: with autograd's operations they take an eighth of a small model's training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from flexrlhf.config.model_families import Families


def use_own_norms(model: PreTrainedModel) -> None:
    """Have the norms of a family with Llama's compute float32 on CPUs by ``_Norm``; parameters stay as they are."""
    if model.config.model_type in Families.KNOWN:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _Forward(module, module.forward)


class _Forward:
    """Forward of a norm. ``other``: that of other types and devices, and of passes without gradients."""

    def __init__(self, norm: nn.Module, other: Any) -> None:
        self._norm, self._other = norm, other

    def __call__(self, values: Tensor) -> Tensor:
        weight = self._norm.weight
        trains = torch.is_grad_enabled() and not values.is_cuda
        if not trains or (values.dtype, weight.dtype) != (torch.float32, torch.float32):
            result: Tensor = self._other(values)
        else:
            result = _Norm.apply(values, weight, self._norm.variance_epsilon)
        return result


class _Norm(torch.autograd.Function):
    """``values`` (..., H) over the root of their mean square, times ``weight`` (H,)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = values.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        normal = values * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        normal, scale, weight = ctx.saved_tensors
        product = by_output * normal
        for_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, for_weight, None
        along = (product @ weight).div_(-len(weight)).unsqueeze(-1)
        for_values = torch.mul(by_output, weight, out=product).addcmul_(normal, along).mul_(scale)
        return for_values, for_weight, None
