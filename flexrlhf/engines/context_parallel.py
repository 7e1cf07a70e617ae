"""Attention of context-parallel ranks, each of which has a part of the tokens of every row of a pass.

All else in a layer concerns a token alone, and the rank that has it. Two ways (``ModelSpec.is_ring``):

* Ulysses (Jacobs et al. 2023): an all-to-all gives every rank all tokens of a part of the heads, and a second one
  returns the outputs to the tokens' ranks.
* Ring attention (Liu et al. 2023): keys and values travel around the ranks. A rank has one chunk of the first half of a
  row and one of the second, so that all ranks have as much causal attention to compute.

The results of a pass are joined over the ranks before losses read them, so a loss is computed by each of them, and the
gradients of the weights are summands: they are summed as those of data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from flexrlhf.engines.attention import PassAttention, SharedAttention, attend
from flexrlhf.engines.ring_attention import ReachedSpans, arrivals, ring_attention
from flexrlhf.engines.row_split import RowSplit


def shared_attention(whole: PassAttention, split: RowSplit, width: int) -> SharedAttention:
    """Return the attention of a pass whose rows, of ``width`` tokens, are split; ``whole``: that of all tokens."""
    if split.is_zigzag:
        return Ring(arrivals(whole.parts, split, width), split)
    assert split.ranks.group is not None, "context-parallel ranks are several"
    return Ulysses(whole, split.ranks.group)


@dataclass(frozen=True)
class Ulysses:
    """Attention in which each rank of ``group`` computes a part of the heads over whole rows."""

    whole: PassAttention
    group: dist.ProcessGroup

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        parts = dist.get_world_size(self.group)
        out = attend(*self._of_own_heads(query, key, value, parts), self.whole, scale)
        # the heads of a token are those of the ranks, in their order
        sent = out.unflatten(0, (len(query), parts, -1)).movedim(1, 0)
        returned: Tensor = _AllToAll.apply(sent, self.group)
        return returned.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _of_own_heads(self, query: Tensor, key: Tensor, value: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (T, H / parts, D), and keys and values, of this rank's heads and all tokens."""
        repeats = lcm(key.shape[1], parts) // key.shape[1]
        states = [query, *(each if repeats == 1 else each.repeat_interleave(repeats, 1) for each in (key, value))]
        # the heads of each rank, of all three together: (parts, m, w, heads of one, D)
        sent = torch.cat([each.unflatten(1, (parts, -1)).permute(1, 0, 3, 2, 4) for each in states], 3)
        # the columns of a row are those of the ranks, in their order
        rows = _AllToAll.apply(sent, self.group).movedim(0, 1).flatten(0, 2)
        own_queries, own_keys, own_values = rows.split([each.shape[1] // parts for each in states], 1)
        return own_queries, own_keys, own_values


class _AllToAll(Function):
    """Exchange of equal slices along the first dim: slice i is sent to rank i of the group, and one comes from it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = values.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


@dataclass(frozen=True)
class Ring:
    """Attention in which keys and values travel around the ranks of ``split``.

    towards:  attention of this rank's tokens to the keys of each rank, in the order in which these arrive.
    """

    towards: tuple[ReachedSpans, ...]
    split: RowSplit

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out = ring_attention(flat[0], flat[1], flat[2], self.towards, self.split, scale)
        return out.unflatten(0, (len(query), -1))
