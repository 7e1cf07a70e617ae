"""Shape of a dense transformer: parameters, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flexrlhf.config.spec import Head
from flexrlhf.weights.shapes import LANGUAGE_HEAD, DecoderSizes, ModelShape, count_elements


@dataclass(frozen=True)
class Transformer(DecoderSizes):
    """Model as its costs follow from it.

    gated:       whether the feed-forward block has three matrices instead of two
    tied:        whether the head is the embedding
    head:        causal or scalar; a scalar head on a trunk with both is not counted
    adapters:    parameters of low-rank adapters; 0: all weights are trained
    """

    gated: bool = True
    tied: bool = False
    head: Literal["causal", "scalar"] = "causal"
    adapters: int = 0

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the matrices of one layer: query, key, value and output, and the feed-forward block's."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def layer_parameters(self) -> int:
        return self.matrix_parameters + 2 * self.hidden

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


def transformer_of(shape: ModelShape, head: Head, is_adapted: bool) -> Transformer:
    """Return the model of a planned ``shape``. ``is_adapted``: adapters count as trained parameters."""
    assert shape.sizes is not None, "shapes without sizes are refused"
    return Transformer(
        **shape.sizes.by_name,
        tied=head != "scalar" and LANGUAGE_HEAD not in shape.names,
        head="scalar" if head == "scalar" else "causal",
        adapters=count_elements(shape.trained) if is_adapted and shape.adapters else 0,
    )
