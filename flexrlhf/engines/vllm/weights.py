"""Weights of a model inside vLLM under their Hugging Face names: views into the tensors that it computes with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def named_views(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return this rank's part of every parameter, by name, without the rows that vLLM pads the vocabulary with."""
    modules = dict(model.named_modules())
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        views.update(_views(model, modules[owner], owner, kind, parameter.detach()))
    return views


def _views(
    model: torch.nn.Module, module: torch.nn.Module, owner: str, kind: str, tensor: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Split one parameter of vLLM into (name, view) of each parameter that is fused in it.

    ``owner``: the name of ``module``; ``kind``: "weight" or "bias".
    """
    parent, _, last = owner.rpartition(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(last)
    if isinstance(module, VocabParallelEmbedding):
        yield f"{owner}.{kind}", tensor[: module.shard_indices.num_org_elements]
    elif fused:
        parts = tensor.split(module.output_partition_sizes)  # type: ignore[arg-type]
        yield from ((f"{parent}.{own}.{kind}", part) for own, part in zip(fused, parts, strict=True))
    else:
        yield f"{owner}.{kind}", tensor
