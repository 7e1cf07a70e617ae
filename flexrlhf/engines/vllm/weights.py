"""Weights of a model inside vLLM under their Hugging Face names: views into the tensors that it computes with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flexrlhf.config.spec import LoraSpec
from flexrlhf.engines.vllm.adapters import adapted_layers
from flexrlhf.weights.lora import BASE, merged_from


def named_views(model: torch.nn.Module, lora: LoraSpec | None = None) -> dict[str, Tensor]:
    """Return this rank's part of every parameter, by name, without the rows that vLLM pads the vocabulary with.

    ``lora``: adapters that vLLM adds; their parameters, and those of the layers that they change, have peft's names.
    """
    modules = dict(model.named_modules())
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        path, is_wrapped = owner.removesuffix(BASE[:-1]), owner.endswith(BASE[:-1])
        for own, part in _parts(model, modules[owner], path, parameter.detach()):
            views[f"{own}{BASE if is_wrapped and _has_adapter(own, lora) else '.'}{kind}"] = part
    for path, layer in adapted_layers(model):
        for own, a, b in zip(_fused(model, path), layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            if lora is not None and _has_adapter(own, lora):
                _, name_a, name_b = merged_from(own)
                views |= {name_a: a[0, 0, : lora.rank], name_b: b[0, 0, :, : lora.rank]}
    return views


def _has_adapter(path: str, lora: LoraSpec | None) -> bool:
    """Whether the layer at ``path``, one with room for an adapter, has one."""
    return lora is not None and (lora.targets is None or path.rpartition(".")[2] in lora.targets)


def _fused(model: torch.nn.Module, path: str) -> list[str]:
    """Return the names of the layers that are fused in the one at ``path``: itself where it is one."""
    parent, _, last = path.rpartition(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(last)
    return [f"{parent}.{own}" for own in fused] if fused else [path]


def _parts(model: torch.nn.Module, module: torch.nn.Module, path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split one parameter of ``module`` into (layer, view) of each layer that is fused in it.

    ``path``: the name of ``module``.
    """
    layers = _fused(model, path)
    if isinstance(module, VocabParallelEmbedding):
        yield path, tensor[: module.shard_indices.num_org_elements]
    elif len(layers) > 1:
        yield from zip(layers, tensor.split(module.output_partition_sizes), strict=True)  # type: ignore[arg-type]
    else:
        yield path, tensor
