"""Attention whose heads have sinks (gpt-oss), under a mask: a function of transformers' interface.

A sink is a logit next to those of keys, with a value of 0. Attention to keys alone, of which torch's kernels return the
log-sum-exp, is multiplied by the share that the sink leaves. Its backward pass is theirs, from the output and the
log-sum-exp of both together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import eager_mask

from flexrlhf.engines.attended_spans import dense, dense_gradients

SINK_ATTENTION = "with_sinks"
"""Name of the attention function in transformers."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_with_sinks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    s_aux: nn.Parameter,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return attention (m, W, H, D), and no weights, of queries (m, H, W, D) and keys and values (m, K, S, D).

    attention_mask:  (m, 1, W, S), 0 or the least number.
    s_aux:           sinks (H,).
    """
    keys, values = (repeat_kv(each, module.num_key_value_groups) for each in (key, value))
    out: Tensor = _SinkAttention.apply(query, keys, values, s_aux, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


class _SinkAttention(Function):
    """Attention (m, H, W, D) to keys and values (m, H, S, D), and to ``sinks`` (H,) with a value of 0."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        out, lse = dense(query, key, value, False, scale, mask)
        of_sinks = sinks.float()[None, :, None]
        out = out * torch.sigmoid(lse - of_sinks).to(out.dtype).unsqueeze(-1)
        whole = torch.logaddexp(lse, of_sinks)
        ctx.save_for_backward(query, key, value, sinks, mask, out, whole)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, mask, out, whole = ctx.saved_tensors
        found = dense_gradients(by_output, query, key, value, out, whole, False, ctx.scale, mask)
        share = torch.exp(sinks.float()[None, :, None] - whole)
        of_sinks = -(share * (by_output * out).sum(-1, dtype=torch.float32)).sum((0, 2)).to(sinks.dtype)
        return *found, of_sinks, None, None


AttentionInterface.register(SINK_ATTENTION, attention_with_sinks)
AttentionMaskInterface.register(SINK_ATTENTION, eager_mask)
