"""Checkpointed layers, whose inputs may be in host memory from the forward to the backward pass.

A layer's input leaves the device while the next layer computes, and comes back while the layer after it, in the order
of the forward pass, computes its gradients. So the device has the inputs of two layers at a time. Copies are made on
the rank's copy streams; host memory is kept for the next pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from flexrlhf.engines.base import EngineContext
from flexrlhf.engines.copy_streams import CopyStreams


@dataclass(eq=False)
class _Kept:
    """An input in host memory.

    memory:   host memory (uint8), at least as large.
    values:   its copy there, in the shape and type of the input.
    copied:   when host memory has it; None on a CPU, where copies are made by the call.
    device:   the input on the device, as it was or as it comes back; None: it is in host memory alone.
    arrival:  when the device has it; None: it has it already.
    """

    memory: Tensor
    values: Tensor
    copied: torch.Event | None
    device: Tensor | None
    arrival: torch.Event | None = None


def checkpoint_layers(model: PreTrainedModel, context: EngineContext) -> None:
    """Have ``recomputing`` compute the activations of every layer again, from its input, as the settings say."""
    settings = context.placed.settings
    if not settings.activation_checkpointing or not context.placed.trained:
        return
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    if settings.offload_activations:
        offloaded = OffloadedActivations(context.device, context.copies)
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer._gradient_checkpointing_func = offloaded.around(layer._gradient_checkpointing_func)


class OffloadedActivations:
    """Inputs of the checkpointed layers of one model: the floating-point tensors that their checkpoints save."""

    def __init__(self, device: torch.device, streams: CopyStreams | None) -> None:
        """Copy on ``streams``, which the engines of a rank share; None: on streams of its own."""
        self._device, self._streams = device, CopyStreams(device) if streams is None else streams
        self._kept: list[_Kept] = []  # in the order of the forward pass
        # host memory, and when the last copy of it is made
        self._unused: list[tuple[Tensor, torch.Event | None]] = []

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``checkpoint``, with the inputs that it saves kept here."""

        def checkpointed(*arguments: Any) -> Any:
            # inside the layer the hooks of the checkpoint itself come first
            with saved_tensors_hooks(self._keep, self._restored):
                return checkpoint(*arguments)

        return checkpointed

    def _keep(self, tensor: Tensor) -> Tensor | _Kept:
        if tensor.device.type != self._device.type or not tensor.is_floating_point():
            return tensor
        values = tensor.detach().contiguous()
        memory = self._memory(values.nbytes)
        host = memory[: values.nbytes].view(values.dtype).view(values.shape)
        if self._kept:
            self._leave(self._kept[-1])
        kept = _Kept(memory, host, self._streams.copy(values, host), values)
        self._kept.append(kept)
        return kept

    def _restored(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        place = self._kept.index(kept)
        self._arrive(kept)
        if place:
            self._arrive(self._kept[place - 1])
        if kept.arrival is not None:
            self._streams.wait_for(kept.arrival)
        del self._kept[place]
        self._unused.append((kept.memory, kept.arrival or kept.copied))
        assert kept.device is not None, "it has arrived"
        return kept.device

    def _leave(self, kept: _Kept) -> None:
        """Free the device memory of an input once host memory has it."""
        if kept.copied is not None:
            self._streams.wait_for(kept.copied)
        kept.device = None

    def _arrive(self, kept: _Kept) -> None:
        """Begin to copy an input back to the device, unless it is there or on its way."""
        if kept.device is None:
            kept.device = torch.empty_like(kept.values, device=self._device)
            kept.arrival = self._streams.copy(kept.values, kept.device, kept.copied)

    def _memory(self, size: int) -> Tensor:
        """Return host memory of at least ``size`` bytes; too small a one is freed, once no copy uses it."""
        memory, last = self._unused.pop() if self._unused else (None, None)
        if memory is not None and memory.nbytes >= size:
            return memory
        if last is not None:
            last.synchronize()
        return self._streams.host_memory(size)
