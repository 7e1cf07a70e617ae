"""Experts of which each rank has a part: tokens travel to the ranks of their experts, and outputs back.

It is a function registered with transformers: a model's own router and block call it, whatever the family. Ranks of
a group have different tokens, so all of them call the model equally often (``lockstep`` in ``passes.py``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

OVER_RANKS = "over_ranks"
"""Name of the function in transformers."""


def has_experts(module: nn.Module | None) -> bool:
    """Whether ``module`` has the experts of a layer, in one tensor for each matrix."""
    return hasattr(module, "gate_up_proj") and isinstance(getattr(module, "num_experts", None), int)


def split_experts(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Leave each rank of ``group`` its part of the experts of every layer of ``model``, as many as any other.

    Parameters may be on the meta device.
    """
    for module in model.modules():
        if has_experts(module):
            module.expert_group = group
            module.num_experts //= group.size()
            for name, parameter in list(module.named_parameters(recurse=False)):
                part = parameter.detach().chunk(group.size(), 0)[group.rank()].clone()
                setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    model.config._experts_implementation = OVER_RANKS


def experts_over_ranks(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum (T, H) of the outputs of the experts of each token.

    hidden:   (T, H) tokens of this rank.
    chosen:   (T, k) experts of each token, numbered over all ranks.
    weights:  (T, k) of their outputs.
    """
    group, (tokens, top) = module.expert_group, chosen.shape
    here, flat = module.num_experts, chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=here * group.size()).view(group.size(), here)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
    rows = _TokenExchange.apply(hidden[order // top], sent, received, group)
    experts = torch.arange(here, device=flat.device).repeat(group.size()).repeat_interleave(arriving.reshape(-1))
    returned = _TokenExchange.apply(_own_experts(module, rows, experts), received, sent, group)
    outputs = torch.empty_like(returned).index_copy(0, order, returned).view(tokens, top, -1)
    # as transformers': each output is rounded after its weight, and the sum has the type of the weighted outputs
    return (outputs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _own_experts(module: Any, rows: Tensor, experts: Tensor) -> Tensor:
    """Return the outputs (S, H) of this rank's ``experts`` (S,), one for each of ``rows`` (S, H)."""
    if len(rows):
        return grouped_mm_experts_forward(module, rows, experts.unsqueeze(1), rows.new_ones(len(rows), 1))
    # weights that nobody asked for have gradients, too: of zero, since FSDP2 sums them on all ranks or on none
    padding = rows.new_zeros(1, rows.shape[1])
    return grouped_mm_experts_forward(module, padding, experts.new_zeros(1, 1), padding.new_ones(1, 1))[:0] + rows


class _TokenExchange(Function):
    """Rows (n, H) by the rank that they go to, exchanged for those that come from each rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


ALL_EXPERTS_FUNCTIONS.register(OVER_RANKS, experts_over_ranks)
