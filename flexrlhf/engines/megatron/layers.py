"""Layers of a decoder on Megatron-Core that compute what transformers' do for Llama-like families.

Megatron's own attention assumes one text a row, with positions from 0. Here it reads the mask of packed rows, and each
part of a fused projection is contiguous, so that it is a view of the fused weight.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class RmsNorm(nn.RMSNorm):
    """Root-mean-square norm whose gradient Megatron sums over tensor-parallel ranks under sequence parallelism."""

    weight: Any

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class MaskedAttention(nn.Module):
    """Attention of grouped queries by torch's kernels, under any mask."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.group = config.num_attention_heads // config.num_query_groups

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        """Return (W, m, heads x head size) of queries, keys and values (W, m, heads, head size).

        mask: (m, 1, W, W), added to the scores; None: causal.
        """
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        is_grouped = self.group > 1
        if is_grouped and (mask is not None or query.dtype == torch.float32):
            # CUDA's kernels for groups have no mask and 16 bits alone; all others would store the scores
            key, value = (tensor.repeat_interleave(self.group, 1) for tensor in (key, value))
            is_grouped = False
        out = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=is_grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


class ContiguousAttention(SelfAttention):
    """Self-attention whose fused projection has all queries of a rank first, then its keys, then its values.

    Megatron interleaves them by group, and a part would be no view that can be written to.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (W, m, heads, head size)."""
        fused, _bias = self.linear_qkv(hidden_states)
        heads = self.num_attention_heads_per_partition, *[self.num_query_groups_per_partition] * 2
        size = self.hidden_size_per_attention_head
        parts = fused.split([count * size for count in heads], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
        return self.q_layernorm(query), self.k_layernorm(key), value


def layers_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Return the modules of ``num_layers`` layers and the norm behind the last."""
    of_heads = RmsNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=MaskedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=of_heads,
        k_layernorm=of_heads,
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=RmsNorm,
        self_attention=ModuleSpec(ContiguousAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RmsNorm,
        mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
        mlp_bda=get_bias_dropout_add,
    )
    return TransformerBlockSubmodules([ModuleSpec(TransformerLayer, submodules=layer)] * num_layers, RmsNorm)
