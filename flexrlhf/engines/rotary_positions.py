"""Rotary positions (Su et al. 2021) on CPUs: transformers' numbers, in half the passes over memory.

An attention layer of transformers calls a function of its module. Layers here get a copy of their forward method that
calls another function by that name, so that the module and other models stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from flexrlhf.config.model_families import Families

_NAME = "apply_rotary_pos_emb"


def use_own_rotation(model: PreTrainedModel) -> None:
    """Have attention of families that are built as Llama is turn float32 queries and keys on CPUs by ``_Rotation``."""
    # others turn pairs of neighbours, or a part of a head, or have half of the cosines
    if model.config.model_type not in Families.SERVED or model.config.model_type in Families.WITH_SINKS:
        return
    for module in model.modules():
        # without the wrapper by which transformers since 5.24 takes former names of arguments
        forward: Any = unwrap(type(module).forward)
        other = getattr(forward, "__globals__", {}).get(_NAME)
        if other is not None and type(module).__name__.endswith("Attention"):
            names = {**forward.__globals__, _NAME: _Turn(other)}
            copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
            module.forward = MethodType(copied, module)


class _Turn:
    """Queries (m, H, W, D) and keys (m, K, W, D) turned by angles (m, W, D). ``other``: for other types and devices."""

    def __init__(self, other: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._other = other

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if query.is_cuda or any(each.dtype != torch.float32 for each in (query, key, cos)):
            return self._other(query, key, cos, sin)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)


class _Rotation(Function):
    """``values`` (m, H, W, D), whose halves are turned together by the angles of ``cos`` and ``sin`` (m, 1, W, D)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        turned = values * cos
        (one, two), (first, second), (low, high) = (each.chunk(2, -1) for each in (values, turned, sin))
        first.sub_(two * low)  # addcmul_ would round once less
        second.add_(one * high)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        gradient = by_output * cos
        (one, two), (first, second), (low, high) = (each.chunk(2, -1) for each in (by_output, gradient, sin))
        first.addcmul_(two, high)
        second.addcmul_(one, low, value=-1)
        return gradient, None, None
