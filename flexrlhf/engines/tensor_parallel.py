"""Tensor parallelism of a transformers model: linear layers and head, of which each rank of a group has a part.

Parameters are plain tensors of a rank's part, whatever engine owns them. Layers are split by the model's own plan,
along their outputs (columns) or their inputs (rows; Shoeybi et al. 2019), the head along the vocabulary.

A layer with low-rank adapters communicates as often as one without. One matrix of an adapter is split as the weight
that it changes: B along the outputs of a column, A along the inputs of a row. All ranks have the other matrix and
multiply it by their part alone, so its gradients are summands.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear as linear_map
from transformers import PreTrainedModel

from flexrlhf.comm.reduce import Summed
from flexrlhf.engines.language_head import LanguageHead
from flexrlhf.weights.shards import tensor_parallel_dim

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as AdaptedLinear


class ParallelLinear(nn.Linear):
    """``linear`` with parameters that are split along ``dims`` over ``group``; None: whole.

    split_matrix:   matrix of an adapter that is split as the weight.
    whole_matrix:   the other one.
    communicates:   whether a call has the whole result; else the layer that it is in calls ``enter`` and ``leave``.
    """

    split_matrix: ClassVar[str]
    whole_matrix: ClassVar[str]

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup, dims: dict[str, int | None]) -> None:
        # torch's annotation claims that there always is a bias
        parameters = dict(linear.named_parameters(recurse=False))
        super().__init__(linear.in_features, linear.out_features, "bias" in parameters, device="meta")
        self.train(linear.training)
        self.group = group
        self.communicates = True
        for name, parameter in parameters.items():
            setattr(self, name, _part(parameter, dims[name], group))

    def forward(self, input: Tensor) -> Tensor:
        return self.leave(self._product(self.enter(input))) if self.communicates else self._product(input)

    def enter(self, input: Tensor) -> Tensor:
        """Return the input of this rank's product."""
        return input

    def leave(self, output: Tensor) -> Tensor:
        """Return the layer's output from this rank's product, which may be overwritten."""
        return output

    def _product(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class ColumnLinear(ParallelLinear):
    """Linear layer with a part of the outputs on each rank; all have the whole input."""

    split_matrix, whole_matrix = "lora_B", "lora_A"

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__(linear, group, {"weight": 0, "bias": 0})

    def enter(self, input: Tensor) -> Tensor:
        shared: Tensor = SumOfGradients.apply(input, self.group)
        return shared

    def _product(self, input: Tensor) -> Tensor:
        return linear_map(input, self.weight, self.bias)


class RowLinear(ParallelLinear):
    """Linear layer with a part of the inputs on each rank, whose outputs are summed over the ranks."""

    split_matrix, whole_matrix = "lora_A", "lora_B"

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__(linear, group, {"weight": 1, "bias": None})

    def leave(self, output: Tensor) -> Tensor:
        total: Tensor = Summed.apply(output, self.group)
        return total if self.bias is None else total + self.bias

    def _product(self, input: Tensor) -> Tensor:
        return linear_map(input, self.weight)


@dataclass(frozen=True)
class TensorParallelNames:
    """Names of parameters, by what ranks of a tensor-parallel group have of them.

    split:    parts of the parameter.
    partial:  all of the parameter, with gradients that are partial sums over the ranks.
    """

    split: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()

    @classmethod
    def apply(cls, model: PreTrainedModel, head: LanguageHead | None, group: dist.ProcessGroup) -> TensorParallelNames:
        """Replace layers of ``model`` and the weight of ``head`` by this rank's parts of them, by the model's own plan.

        Parameters may be on the meta device.
        """
        base_name = model.base_model_prefix
        plan: dict[str, str] = _SHARED_EXPERT | model.config.base_model_tp_plan
        styles = {f"{base_name}.{path}": _STYLES[style] for path, style in plan.items() if style in _STYLES}
        ends = [path.replace("*", "").strip(".").split("..")[-1] for path, style in plan.items() if style == _PARTIAL]
        whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        partial = {name for name in whole if name.rpartition(".")[0].endswith(tuple(ends))}
        for name, module in list(model.named_modules()):
            style = next((style for path, style in styles.items() if fnmatchcase(name, path)), None)
            if style is not None and hasattr(module, "base_layer"):
                partial |= {f"{name}.{each}" for each in _split_adapted(module, style, group)}
            elif style is not None:
                model.set_submodule(name, style(module, group))
        if head is not None and not model.config.tie_word_embeddings:
            _split_head(head, group)
        split = {name for name, parameter in model.named_parameters() if tuple(parameter.shape) != whole[name]}
        return cls(frozenset(split), frozenset(partial))


_STYLES: dict[str, type[ColumnLinear] | type[RowLinear]] = {"colwise": ColumnLinear, "rowwise": RowLinear}
_SHARED_EXPERT = {
    **{f"layers.*.mlp.shared_expert.{name}": "colwise" for name in ("gate_proj", "up_proj")},
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}
"""Layers of Qwen2-MoE that its plan leaves out."""
_PARTIAL = "replicated_with_grad_allreduce"
"""transformers' style of weights that each tensor-parallel rank applies to its own heads."""


def _split_adapted(
    layer: AdaptedLinear, style: type[ColumnLinear] | type[RowLinear], group: dist.ProcessGroup
) -> list[str]:
    """Split a linear layer of peft with its adapters.

    Returns the parameters inside it whose gradients are partial sums over the ranks of ``group``.
    """
    base = layer.base_layer = style(layer.base_layer, group)
    matrices = getattr(layer, style.split_matrix)
    for name, matrix in list(matrices.items()):
        matrices[name] = style(matrix, group)
    for part in (base, *matrices.values()):
        part.communicates = False
    layer.register_forward_pre_hook(lambda _, inputs: (base.enter(inputs[0]), *inputs[1:]))
    layer.register_forward_hook(lambda _, __, output: base.leave(output))
    return [f"{style.whole_matrix}.{name}.weight" for name in matrices]


def _split_head(head: LanguageHead, group: dist.ProcessGroup) -> None:
    """Replace the head's weight by this rank's rows, where the group divides the vocabulary."""
    if tensor_parallel_dim("lm_head.weight", tuple(head.weight.shape), group.size()) is not None:
        head.weight, head.group = _part(head.weight, 0, group), group


def _part(parameter: Tensor, dim: int | None, group: dist.ProcessGroup) -> nn.Parameter:
    """Return this rank's part of ``parameter``, in memory of its own; None: all of it."""
    values = parameter.detach()
    if dim is not None:
        values = values.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


class SumOfGradients(Function):
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
