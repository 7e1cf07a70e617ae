"""Shape of a dense transformer: parameters, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flexrlhf.weights.shapes import Sizes


@dataclass(frozen=True)
class Transformer:
    """Sizes that a model's costs follow from.

    layers:      decoder layers
    hidden:      hidden size
    ffn:         inner size of the feed-forward block
    heads:       query heads
    kv_heads:    key-value heads
    head_dim:    size of a head
    vocabulary:  rows of the embedding
    gated:       whether the feed-forward block has three matrices instead of two
    tied:        whether the head is the embedding
    head:        causal or scalar; a scalar head on a trunk with both is not counted
    adapters:    parameters of low-rank adapters; 0: all weights are trained
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    head: Literal["causal", "scalar"] = "causal"
    adapters: int = 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of query, key, value and output matrices of one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def ffn_parameters(self) -> int:
        """Parameters of the feed-forward matrices of one layer."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.ffn_parameters + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        return self.hidden * (self.vocabulary if self.head == "causal" else 1)

    @property
    def parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        own_head = 0 if self.tied and self.head == "causal" else self.head_parameters
        return self.layers * self.layer_parameters + self.hidden * (self.vocabulary + 1) + own_head

    @property
    def trained_parameters(self) -> int:
        return self.adapters or self.parameters

    def kv_bytes(self, item: int = 2) -> int:
        """Return the bytes of one token's keys and values in all layers; ``item``: bytes of one number."""
        return 2 * item * self.layers * self.kv_heads * self.head_dim

    def as_scorer(self) -> Transformer:
        """Return the model with a scalar head instead of the vocabulary's."""
        return replace(self, head="scalar")


def transformer_of(sizes: Sizes, is_scorer: bool, tied: bool, adapters: int = 0) -> Transformer:
    """Return the shape of a planned model."""
    return Transformer(
        layers=sizes.layers,
        hidden=sizes.hidden,
        ffn=sizes.ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocabulary=sizes.vocabulary,
        tied=tied,
        head="scalar" if is_scorer else "causal",
        adapters=adapters,
    )
