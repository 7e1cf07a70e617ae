"""Pipeline stages: consecutive layers of a decoder, on ranks of their own."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from flexrlhf.weights.shapes import ModelShape, Parameters

EMBEDDING = ".embed_tokens.weight"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@lru_cache(maxsize=256)
def of_stage(shape: ModelShape, stage: int, pp: int) -> Parameters:
    """Return the parameters of a pipeline stage, of ``pp``, which divides the number of layers.

    Stages have equally many layers. The embedding is on the first stage, and where the language head is tied to it on
    the last one, too; what follows the layers is on the last.
    """
    found = {name: layer_of(name) for name, _ in shape.parameters}
    layers = 1 + max((layer for layer in found.values() if layer is not None), default=-1)
    assert layers % pp == 0, f"{layers} layers, pp {pp}"

    def stages(name: str) -> set[int]:
        layer = found[name]
        if layer is not None:
            return {layer * pp // layers}
        if f".{name}".endswith(EMBEDDING):
            return {0, pp - 1} if shape.is_tied else {0}
        return {pp - 1}

    return tuple((name, size) for name, size in shape.parameters if stage in stages(name))


@lru_cache(maxsize=256)
def shape_of_stage(shape: ModelShape, stage: int, pp: int) -> ModelShape:
    """Return ``shape`` with the parameters of a pipeline stage alone."""
    return shape if pp == 1 else replace(shape, parameters=of_stage(shape, stage, pp))


def layer_of(name: str) -> int | None:
    """Return the number of the layer that parameter ``name`` is in; None for the embedding, the last norm and heads."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])
