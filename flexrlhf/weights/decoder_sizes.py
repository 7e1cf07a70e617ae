"""Sizes of decoders: of dense ones, and of layers with experts and with latent attention."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of a decoder, each of which is a gated MLP.

    number:  routed experts of a layer.
    active:  of them that compute a token.
    ffn:     inner size of a routed expert.
    shared:  inner size of the experts that compute every token, together; 0: none.
    dense:   layers that have one MLP instead.
    """

    number: int
    active: int
    ffn: int
    shared: int = 0
    dense: frozenset[int] = frozenset()

    def taken(self, tokens: float) -> float:
        """Return how many experts of a layer compute any of ``tokens``, if each expert is as likely."""
        untaken: float = (1 - self.active / self.number) ** tokens
        return self.number * (1 - untaken)


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention: keys and values of all heads are made from one latent of a token, but for
    the part of keys with rotary angles, which heads share.

    query:  features of the latent of queries; 0: they have none.
    key:    features of the latent of keys and values.
    rotary: features of a head's query and key with rotary angles.
    plain:  the other ones.
    value:  features of a head's value.
    """

    query: int
    key: int
    rotary: int
    plain: int
    value: int

    @property
    def cached(self) -> int:
        """Numbers of a token that a cache stores in a layer."""
        return self.key + self.rotary

    @property
    def expanded(self) -> int:
        """Numbers that are made from the latent for a token and head."""
        return self.plain + self.value


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder, from which its parameters, activations, caches and costs follow.

    layers:      decoder layers.
    hidden:      hidden size.
    ffn:         inner size of the feed-forward block of a layer without experts.
    heads:       query heads.
    kv_heads:    key-value heads.
    head_dim:    size of a head, of latent attention that of its queries and keys.
    vocabulary:  rows of the embedding.
    experts:     of the other layers; None: all layers are dense.
    latent:      of latent attention; None: heads have keys and values of their own.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: ExpertSizes | None = field(default=None, kw_only=True)
    latent: LatentSizes | None = field(default=None, kw_only=True)

    @property
    def by_name(self) -> dict[str, Any]:
        """Sizes of this class alone, by name."""
        return {size.name: getattr(self, size.name) for size in fields(DecoderSizes)}

    @property
    def attention_parameters(self) -> int:
        """Parameters of the matrices of a layer's attention."""
        latent, queries = self.latent, self.heads * self.head_dim
        if latent is None:
            return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        of_queries = latent.query * (self.hidden + queries) if latent.query else self.hidden * queries
        of_keys = self.hidden * latent.cached + latent.key * self.heads * latent.expanded
        return of_queries + of_keys + self.hidden * self.heads * latent.value

    @property
    def attention_features(self) -> float:
        """Features over which attention multiplies each pair of tokens, in the mean of scores and outputs."""
        if self.latent is None:
            return self.heads * self.head_dim
        return self.heads * (self.head_dim + self.latent.value) / 2

    @property
    def cached_features(self) -> int:
        """Numbers of a token that a cache stores in a layer."""
        return 2 * self.kv_heads * self.head_dim if self.latent is None else self.latent.cached

    def cache_parts(self, tp: int) -> int:
        """Return the number of parts that ``tp`` ranks have of a cache: a latent is on all of them, a key-value head on
        several where there are fewer."""
        return min(tp, self.kv_heads) if self.latent is None else 1

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else self.layers - len(self.experts.dense)

    @property
    def stored_ffn(self) -> float:
        """Inner features of the MLPs of a layer, with all experts, in the mean over layers."""
        return self.mean_ffn(0 if self.experts is None else self.experts.number)

    @property
    def active_ffn(self) -> float:
        """Inner features that compute a token in a layer, in the mean over layers."""
        return self.mean_ffn(0 if self.experts is None else self.experts.active)

    def mean_ffn(self, routed: float) -> float:
        """Return the inner features of a layer, in the mean over layers, of which ``routed`` experts count."""
        if self.experts is None:
            return self.ffn
        of_sparse = routed * self.experts.ffn + self.experts.shared
        return (self.sparse_layers * of_sparse + len(self.experts.dense) * self.ffn) / self.layers


@dataclass(frozen=True)
class Sizes(DecoderSizes):
    """Sizes of a decoder of a known ``family``, the ``model_type`` of its config.

    head_norms:  whether queries and keys have norms.
    sinks:       whether heads have a sink, so that attention in transformers keeps its weights.
    """

    family: str
    head_norms: bool = False
    sinks: bool = False
