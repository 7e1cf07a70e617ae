"""Bytes of attention by lengths in one layer, on one rank, per token that the rank computes.

Context-parallel ranks exchange in one of two ways (``engines/context_parallel.py``). Ulysses stores queries, keys and
values of a rank's heads next to those of its tokens, and each output twice. In a ring there are keys and values of two
ranks at a time; outputs and gradients are summed in float32, and backward gradients of keys and values travel, too.
The activations of a layer's MLP do not exist meanwhile: an exchange adds to a peak only where it takes more than they.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True)
class AttentionBytes:
    """Attention of a layer's heads on one tensor-parallel rank.

    heads:     query heads.
    kv_heads:  heads of keys and values.
    head_dim:  features of a head.
    item:      bytes of a number.
    parts:     ranks that each have a part of the tokens of a row.
    is_ring:   whether keys and values travel around these, else heads are exchanged for tokens.
    """

    heads: int
    kv_heads: int
    head_dim: int
    item: int
    parts: int = 1
    is_ring: bool = False

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps: queries, keys, values, outputs and their log-sum-exps."""
        exchanged = self._query if self._is_ulysses else 0
        return self.item * (2 * self._query + 2 * self._exchanged_key + exchanged) + 4 * self.heads

    @property
    def forward(self) -> int:
        """Bytes of queries, keys and values, also repeated for each head, outputs of one call and of all,
        log-sum-exps, and of exchanges."""
        query, key, exchanged, item = self._query, self._key, self._exchanged_key, self.item
        repeated = 2 * query if self.kv_heads < self.heads else 0
        own = item * (query + 2 * key)
        if self.is_ring:
            # a kernel computes the queries of half a part; in 16 bits its output is cast to be joined
            output = item * query // 2 if item == 4 else 4 * query
            return own + 4 * item * key + 4 * query + item * query + output + 12 * self.heads
        computed = item * (2 * query + repeated) + 4 * self.heads
        if not self._is_ulysses:
            return own + computed
        arrived = item * (query + 2 * exchanged)
        leaving = arrived + (2 * item * exchanged if exchanged > key else 0)
        return own + arrived + max(computed, leaving)

    @property
    def gradients(self) -> int:
        """Bytes of repeated keys and values, and of gradients, in the backward pass."""
        if not self.is_ring:
            return self.item * (5 * self._query + 2 * self._exchanged_key)
        # keys and values of this step and the next; gradients of this step, that leave, and that arrive
        travelling = self.item * (2 + 2 * (self.parts > 2)) * self._key + 3 * 4 * 2 * self._key
        return travelling + 4 * self._query + self.item * (7 * self._query // 2 + 2 * self._key)

    @property
    def _is_ulysses(self) -> bool:
        return self.parts > 1 and not self.is_ring

    @property
    def _query(self) -> int:
        return self.heads * self.head_dim

    @property
    def _key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def _exchanged_key(self) -> int:
        heads = lcm(self.kv_heads, self.parts) if self._is_ulysses else self.kv_heads
        return heads * self.head_dim
