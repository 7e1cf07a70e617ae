"""Layers with experts in a stage: the router and the experts as transformers computes them, of this rank's tokens.

Under sequence parallelism tensor-parallel ranks have different tokens, which travel to the ranks of their experts.
Megatron-Core's own layer has another order of sums, and its dispatchers copy on streams of CUDA.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexrlhf.api.engine import ExpertSplit, has_experts, use_float32_routers


class RoutedExperts(nn.Module):
    """Layer of experts, of which each rank of ``group`` has a part; its parameters are not read yet.

    block:  of transformers, whose class and config it has.
    dtype:  of its parameters.
    float32_routers: whether its router computes in float32.
    """

    def __init__(self, block: Any, group: dist.ProcessGroup, dtype: torch.dtype, float32_routers: bool) -> None:
        super().__init__()
        config = copy(block.experts.config)
        with torch.device("meta"):
            made: Any = type(block)(config)
        if group.size() > 1:
            ExpertSplit(group, None).apply(made, config)
        self.block = made.to(dtype).to_empty(device=torch.cuda.current_device())
        if float32_routers:
            use_float32_routers(self.block)
        # of this rank's tokens: Megatron sums its gradients over the tensor-parallel ranks
        for parameter in self.block.gate.parameters():
            parameter.sequence_parallel = group.size() > 1

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return the layer's output of ``hidden`` (W, m, H), and no bias."""
        return self.block(hidden), None


def expert_blocks(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the blocks of transformers that have experts, by the number of their layer."""
    layers: Any = model.base_model.layers
    return {
        number: layer.mlp for number, layer in enumerate(layers) if has_experts(getattr(layer.mlp, "experts", None))
    }
