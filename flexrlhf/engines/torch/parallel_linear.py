"""Linear layers of a tensor-parallel group, computed from each rank's own tensors.

Parameters are DTensors, as FSDP2, optimizers and checkpoints take them. The products are of plain tensors: DTensor
derives the layout of every operation anew for each shape, which takes longer than a small product.

A layer with low-rank adapters communicates as often as one without. One matrix of an adapter is split as the weight
that it changes: B along the outputs of a column, A along the inputs of a row. All ranks have the other matrix and
multiply it by their part alone, so its gradients are summands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear as linear_map

from flexrlhf.comm.reduce import Summed

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as AdaptedLinear


class ParallelLinear(nn.Linear):
    """``linear`` with parameters of these placements, sharded over ``mesh``. Every rank has them, or reads its part.

    split_matrix:   matrix of an adapter that is split as the weight.
    whole_matrix:   the other one.
    communicates:   whether a call has the whole result; else the layer that it is in calls ``enter`` and ``leave``.
    """

    split_matrix: ClassVar[str]
    whole_matrix: ClassVar[str]

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, weight: Placement, bias: Placement) -> None:
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.train(linear.training)
        self.group = mesh.get_group()
        self.communicates = True
        for name, placement in {"weight": weight, **({"bias": bias} if has_bias else {})}.items():
            values = getattr(linear, name)
            shard = distribute_tensor(values, mesh, [placement], src_data_rank=None)
            setattr(self, name, nn.Parameter(shard, requires_grad=values.requires_grad))

    def forward(self, input: Tensor) -> Tensor:
        return self.leave(self._product(self.enter(input))) if self.communicates else self._product(input)

    def enter(self, input: Tensor) -> Tensor:
        """Return the input of this rank's product."""
        return input

    def leave(self, output: Tensor) -> Tensor:
        """Return the layer's output from this rank's product, which may be overwritten."""
        return output

    def _product(self, input: Tensor) -> Tensor:
        return linear_map(input, _of_rank(self.weight))

    def _bias(self) -> Tensor | None:
        return None if self.bias is None else _of_rank(self.bias)


class ColumnLinear(ParallelLinear):
    """Linear layer with a part of the outputs on each rank; all have the whole input."""

    split_matrix, whole_matrix = "lora_B", "lora_A"

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear, mesh, Shard(0), Shard(0))

    def enter(self, input: Tensor) -> Tensor:
        shared: Tensor = _SumOfGradients.apply(input, self.group)
        return shared

    def _product(self, input: Tensor) -> Tensor:
        return linear_map(input, _of_rank(self.weight), self._bias())


class RowLinear(ParallelLinear):
    """Linear layer with a part of the inputs on each rank, whose outputs are summed over the ranks."""

    split_matrix, whole_matrix = "lora_A", "lora_B"

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__(linear, mesh, Shard(1), Replicate())

    def leave(self, output: Tensor) -> Tensor:
        total: Tensor = Summed.apply(output, self.group)
        bias = self._bias()
        return total if bias is None else total + bias


ParallelStyle = type[ColumnLinear] | type[RowLinear]


def shard_adapted(layer: AdaptedLinear, style: ParallelStyle, mesh: DeviceMesh) -> list[str]:
    """Shard a linear layer of peft with its adapters.

    Returns the parameters inside it whose gradients are partial sums over the ranks of ``mesh``.
    """
    base = layer.base_layer = style(layer.base_layer, mesh)
    matrices = getattr(layer, style.split_matrix)
    for name, matrix in list(matrices.items()):
        matrices[name] = style(matrix, mesh)
    for part in (base, *matrices.values()):
        part.communicates = False
    layer.register_forward_pre_hook(lambda _, inputs: (base.enter(inputs[0]), *inputs[1:]))
    layer.register_forward_hook(lambda _, __, output: base.leave(output))
    return [f"{style.whole_matrix}.{name}.weight" for name in matrices]


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
