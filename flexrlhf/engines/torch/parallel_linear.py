"""Linear layers of a tensor-parallel group, computed from each rank's own tensors.

Parameters are DTensors, as FSDP2, optimizers and checkpoints take them. The products are of plain tensors: DTensor
derives the layout of every operation anew for each shape, which takes longer than a small product.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear as linear_map


class _ParallelLinear(nn.Linear):
    """``linear`` with parameters of these placements, sharded over ``mesh``. Every rank has them, or reads its part."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, weight: Placement, bias: Placement) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.train(linear.training)
        self.group = mesh.get_group()
        for name, placement in {"weight": weight, **({"bias": bias} if has_bias else {})}.items():
            values = getattr(linear, name)
            shard = distribute_tensor(values, mesh, [placement], src_data_rank=None)
            setattr(self, name, nn.Parameter(shard, requires_grad=values.requires_grad))

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else _of_rank(self.bias)


class ColumnLinear(_ParallelLinear):
    """Linear layer with a part of the outputs on each rank; all have the whole input."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear, mesh, Shard(0), Shard(0))

    def forward(self, input: Tensor) -> Tensor:
        shared: Tensor = _SumOfGradients.apply(input, self.group)
        return linear_map(shared, _of_rank(self.weight), self._bias())


class RowLinear(_ParallelLinear):
    """Linear layer with a part of the inputs on each rank, whose outputs are summed over the ranks."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear, mesh, Shard(1), Replicate())

    def forward(self, input: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(linear_map(input, _of_rank(self.weight)), self.group)
        bias = self._bias()
        return total if bias is None else total + bias


def _of_rank(parameter: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, with a gradient for it."""
    assert isinstance(parameter, DTensor), "FSDP2 gathers a shard to the DTensor of the tensor-parallel group"
    return parameter.to_local()


class _SumOfGradients(Function):
    """The identity, whose gradient is summed over a group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # a copy: autograd may use the gradient itself elsewhere
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(Function):
    """The sum over a group, in place, whose gradient all ranks have."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(values)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
