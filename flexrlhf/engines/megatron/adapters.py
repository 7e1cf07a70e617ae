"""Low-rank adapters of Megatron-Core's linear layers (Hu et al. 2022), which has none of its own.

A fused layer has the adapters of its parts in two parameters: A of all parts below each other, and B likewise. The
matrix on the side that tensor parallelism splits is split, too; all ranks have the other one. Between the two matrices
are ``rank`` features a token, which is all that ranks exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear as linear_map

from flexrlhf.api import LoraSpec


class Adapter(nn.Module):
    """Adapters of the parts of ``linear``, whose output they change.

    linear:              with columns or rows on each rank.
    outputs:             features of each part of its output on this rank, in order.
    lora:                settings.
    group:               tensor-parallel group.
    sequence_parallel:   whether its ranks share the hidden states between layers.
    keeps_start:         whether there is a frozen copy of the adapters.
    """

    def __init__(
        self,
        linear: nn.Module,
        outputs: Mapping[str, int],
        lora: LoraSpec,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        keeps_start: bool,
    ) -> None:
        super().__init__()
        self.targets = tuple(name for name in outputs if lora.targets is None or name in lora.targets)
        self.outputs, self.rank, self.is_at_start = outputs, lora.rank, False
        self._scale, self._group, self._shares = lora.scale, group, sequence_parallel
        self._is_row = isinstance(linear, RowParallelLinear)
        like: Any = linear.weight
        like = like.detach()
        self.a = nn.Parameter(like.new_empty(len(self.targets) * lora.rank, like.shape[1]))
        self.b = nn.Parameter(like.new_empty(sum(outputs[name] for name in self.targets), lora.rank))
        # Megatron then sums its gradients, of this rank's part of the sequences, over the tensor-parallel ranks
        whole: Any = self.b if self._is_row else self.a
        whole.sequence_parallel = sequence_parallel
        self.start = nn.ParameterList(each.detach().clone() for each in (self.a, self.b) if keeps_start)
        self.start.requires_grad_(False)
        linear.adapter = self
        linear.register_forward_hook(lambda _, inputs, output: (self._changed(inputs[0], output[0]), *output[1:]))

    def _changed(self, hidden: Tensor, output: Tensor) -> Tensor:
        if self.is_at_start and not len(self.start):
            return output
        a, b = self.start if self.is_at_start else (self.a, self.b)
        between = self._exchanged(linear_map(hidden, a))
        tokens = torch.addmm(output.flatten(0, -2), between.flatten(0, -2), self._blocks(b).t(), alpha=self._scale)
        return tokens.view_as(output)

    def _blocks(self, b: Tensor) -> Tensor:
        """Return B of all parts (outputs, targets x rank): a block of ``b`` for each target, and else 0."""
        if len(self.outputs) == 1:
            return b
        rows = b.split([self.outputs[name] for name in self.targets])
        blocks = dict(zip(self.targets, rows, strict=True))
        none = {name: b.new_empty(size, 0) for name, size in self.outputs.items()}
        return torch.block_diag(*({**none, **blocks}[name] for name in self.outputs))

    def _exchanged(self, values: Tensor) -> Tensor:
        """Return what B of this rank is multiplied by: of a column's all tokens, of a row's sums over the ranks."""
        if self._group.size() == 1:
            return values
        if self._is_row:
            reduced = (
                reduce_scatter_to_sequence_parallel_region if self._shares else reduce_from_tensor_model_parallel_region
            )
            out: Tensor = reduced(values, group=self._group)
            return out
        copied = gather_from_sequence_parallel_region if self._shares else copy_to_tensor_model_parallel_region
        out = copied(values, group=self._group)
        return out


@contextmanager
def starting_weights(stage: nn.Module) -> Iterator[None]:
    """Compute as the model did before training: without adapters, or with the ones that it started from."""
    adapters = [module for module in stage.modules() if isinstance(module, Adapter)]
    assert adapters, "this model has no adapters"
    for adapter in adapters:
        adapter.is_at_start = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_at_start = False
