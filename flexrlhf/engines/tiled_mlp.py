"""MLPs computed tile by tile along the tokens of a pass, and again in the backward pass (ALST; Bekman et al. 2025).

The widest activations of a layer, four times its MLP features, then exist for one tile at a time. A tile has about as
many tokens as the model has hidden features: with fewer the weights would be read more often than their products take.

Two autograd functions share a layer's MLP. ``_TiledInput`` saves its input and gives the gradients; ``_TiledOutput``
computes the output, saves nothing and passes the gradient on. So a checkpointed layer that is computed again stops at
the input, and an MLP is computed twice in all. Gradients of weights are summed over tiles in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

Forward = Callable[[Tensor], Tensor]


def tile_mlps(model: PreTrainedModel) -> None:
    """Have every layer of ``model`` compute its ``mlp`` in tiles; parameters and their names stay as they are."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            mlp = layer.mlp
            assert isinstance(mlp, nn.Module), "planning admits families whose layers have an mlp"
            mlp.forward = _Tiled(mlp, mlp.forward)


class _Tiled:
    """Forward of ``mlp`` in tiles. ``whole``: that of all tokens at once."""

    def __init__(self, mlp: nn.Module, whole: Forward) -> None:
        self._mlp, self.whole = mlp, whole

    def __call__(self, values: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.output(values)
        kept = _TiledInput.apply(self, values, *self.trained())
        output: Tensor = _TiledOutput.apply(self, kept)
        return output

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters with gradients; FSDP2 replaces them by gathered ones while the layer computes."""
        return [parameter for parameter in self._mlp.parameters() if parameter.requires_grad]

    def output(self, values: Tensor) -> Tensor:
        """Return the output (m, W, H) without a graph."""
        tokens, output = values.flatten(0, -2), None
        for tile in _tiles(tokens):
            part = self.whole(tokens[tile])
            if len(part) == len(tokens):
                return part.view(values.shape)
            if output is None:
                output = part.new_empty(tokens.shape)
            output[tile] = part
        assert output is not None, "a pass has tokens"
        return output.view(values.shape)


class _TiledInput(torch.autograd.Function):
    """The identity. From the gradient of the MLP's output it gives the gradients of its input and its parameters."""

    @staticmethod
    def forward(ctx: Any, mlp: _Tiled, values: Tensor, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        ctx.mlp = mlp
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        with_input, trained = ctx.needs_input_grad[1], ctx.mlp.trained()
        tokens, by_output = values.detach().flatten(0, -2), by_output.flatten(0, -2)
        for_values = torch.empty_like(tokens) if with_input else None
        sums: list[Tensor | None] = [None] * len(trained)
        for tile in _tiles(tokens):
            part = tokens[tile].requires_grad_(with_input)
            with torch.enable_grad():
                output = ctx.mlp.whole(part)
            inputs = [part, *trained] if with_input else trained
            found = list(torch.autograd.grad(output, inputs, by_output[tile]))
            if for_values is not None:
                for_values[tile] = found.pop(0)
            for place, gradient in enumerate(found):
                total = sums[place]
                wide = torch.promote_types(gradient.dtype, torch.float32)
                sums[place] = gradient.to(wide) if total is None else total.add_(gradient)
            del output, found
        gradients = [each if each is None else each.to(p.dtype) for each, p in zip(sums, trained, strict=True)]
        return None, None if for_values is None else for_values.view(values.shape), *gradients


class _TiledOutput(torch.autograd.Function):
    """The output of an MLP, whose gradient goes on as it is."""

    @staticmethod
    def forward(ctx: Any, mlp: _Tiled, values: Tensor) -> Tensor:
        return mlp.output(values)

    @staticmethod
    def backward(ctx: Any, by_output: Tensor) -> tuple[None, Tensor]:
        return None, by_output


def _tiles(tokens: Tensor) -> list[slice]:
    """Split tokens (N, H) into equal tiles of at most H."""
    count, width = tokens.shape
    size = max(1, ceil(count / max(1, ceil(count / width))))
    return [slice(start, start + size) for start in range(0, max(count, 1), size)]
