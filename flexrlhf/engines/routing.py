"""Routers of transformers' models: scores of experts, weights of the chosen ones, and both in float32.

In 16 bits logits of experts are often equal, or in another order than their exact values, so that a token takes other
experts in training than in generation. Families whose routers compute in the type of the model compute their product in
float32 here, as DeepSeek's and GLM's do; the router's weight stays in its type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from flexrlhf.engines.experts import has_experts


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of all layers with experts, in order."""
    blocks = [module for module in model.modules() if has_experts(getattr(module, "experts", None))]
    return [block.router if hasattr(block, "router") else block.gate for block in blocks]


def scores_of(router: Any, logits: Tensor) -> Tensor:
    """Return the scores (T, E) of experts by which ``router`` weighs them, from its logits."""
    return logits.float().sigmoid() if _is_sigmoid(router) else logits.softmax(-1, dtype=torch.float32)


def weights_of(taken: Tensor, router: Any, logits: Tensor) -> Tensor:
    """Return the weights (T, k) of the experts ``taken``, as ``router`` weighs the ones that it chooses."""
    if hasattr(router, "bias"):  # of gpt-oss, which knows the logits of the chosen ones alone
        return logits.gather(1, taken).softmax(-1)
    weights = scores_of(router, logits).gather(1, taken)
    # routers of DeepSeek-V2, which have no such attribute either, do not norm them
    if getattr(router, "norm_topk_prob", not hasattr(router, "topk_method")):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def _is_sigmoid(router: Any) -> bool:
    return hasattr(router, "e_score_correction_bias")


def use_float32_routers(model: nn.Module) -> None:
    """Have routers of a model in 16 bits compute in float32; parameters and their names stay as they are."""
    for router in routers_of(model):
        if not _is_sigmoid(router) and not hasattr(router, "topk_method"):
            router.forward = _Float32Forward(router, router.forward)


class _Float32Forward:
    """Forward of a router. ``other``: that of weights in float32."""

    def __init__(self, router: Any, other: Any) -> None:
        self._router, self._other = router, other

    def __call__(self, hidden: Tensor) -> Any:
        router = self._router
        if router.weight.dtype == torch.float32:
            return self._other(hidden)
        logits = _Float32Product.apply(hidden.reshape(-1, hidden.shape[-1]), router.weight)
        if hasattr(router, "bias"):
            logits = logits + router.bias.float()
        chosen = logits.topk(router.top_k, dim=-1).indices
        weights = weights_of(chosen, router, logits)
        # Mixtral's own are float32 in any type, the others in that of the model
        is_kept = not hasattr(router, "norm_topk_prob") and not hasattr(router, "bias")
        return logits, weights if is_kept else weights.to(hidden.dtype), chosen


class _Float32Product(torch.autograd.Function):
    """``hidden`` (T, H) times ``weight`` (E, H) in float32; autograd keeps both in their own types."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return linear(hidden.float(), weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        for_hidden = (by_logits @ weight.float()).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        for_weight = (by_logits.t() @ hidden.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return for_hidden, for_weight
