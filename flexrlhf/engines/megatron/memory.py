"""Bytes of a placed model's state and updates on Megatron-Core."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

from flexrlhf.api import (
    EngineBytes,
    ModelShape,
    ParameterName,
    Parameters,
    PlacedModel,
    State,
    Units,
    elements_on_rank,
    with_fused_layers,
)

ALIGNMENT, BUFFER_MULTIPLE = 64, 128
"""Elements at whose multiples Megatron-Core 0.16.1 lets a parameter and a buffer of its distributed optimizer begin."""


class MegatronBytes(EngineBytes):
    """Bytes of a placed model on Megatron-Core: gradients are summed in one float32 buffer, which exists at loading and
    while it trains.
    """

    def trained_state(self, model: PlacedModel, shape: ModelShape, rank: int) -> State:
        """Return the state. The distributed optimizer (zero 1) lays parameters out in buffers with gaps, of which each
        replica updates a part.
        """
        per, is_split = self.per_parameter(model), model.settings.zero == 1
        elements = elements_on_rank(model, shape.with_gradients, rank)
        frozen = elements_on_rank(model, shape.parameters, rank) - elements
        buffer = megatron_buffer(model, shape.trained, rank) if is_split else elements
        updated = buffer // model.layout.of_weights.dp if is_split else elements
        return State(
            weights=per.weights * buffer + model.item_bytes * frozen,
            gradients=per.gradients * buffer,
            optimizer=per.optimizer * updated,
            moments=4 * model.settings.optimizer.num_moments * updated,
            at_load=per.gradients * buffer,
        )

    def update(self, model: PlacedModel, trained: Units) -> int:
        # buffers are reduced where they are; the norm of all gradients takes a number of each tensor
        part = -(-trained.total // model.layout.of_weights.dp) if model.settings.zero else trained.total
        return 4 * max(part, trained.largest)


def megatron_buffer(model: PlacedModel, trained: Parameters, rank: int) -> int:
    """Return the elements of a buffer of Megatron's distributed optimizer, which replicas share equally."""
    starts = sum(
        count * -(-elements_on_rank(model, (kind,), rank) // ALIGNMENT) * ALIGNMENT
        for kind, count in _count_kinds(with_fused_layers(trained)).items()
    )
    multiple = math.lcm(model.layout.of_weights.dp, BUFFER_MULTIPLE)
    return -(-starts // multiple) * multiple


@lru_cache(maxsize=256)
def _count_kinds(parameters: Parameters) -> Counter[tuple[str, tuple[int, ...]]]:
    """Count parameters that are split alike: layers repeat, and a split depends on shape and the end of a name."""
    return Counter((ParameterName(name).last_words, size) for name, size in parameters)
