"""Ring attention: keys and values travel around the ranks that have the parts of a row (Liu et al. 2023).

Outputs over the keys of each rank are joined by their log-sum-exps. Backward, each part's gradients are computed from
the joined result, and gradients of keys and values travel with these, back to the rank that they are of.

Tensors are flat, as in ``attended_spans.py``: queries (t, H, D), keys and values (t, K, D) of the t tokens of a rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from flexrlhf.comm.point_to_point import exchange
from flexrlhf.comm.reduce import RankGroup
from flexrlhf.comm.world import InOrder
from flexrlhf.engines.attended_spans import NO_KEYS, AttendedSpans, TokenSpan, attended, gradients, joined
from flexrlhf.engines.row_split import RowSplit

ReachedSpans = tuple[AttendedSpans, ...]
"""Attention of this rank's tokens to the keys of one rank, no query to a key twice."""


def arrivals(parts: Sequence[AttendedSpans], split: RowSplit, width: int) -> tuple[ReachedSpans, ...]:
    """Return the attention of this rank's tokens to the keys of each rank, in the order in which these arrive: its own
    come first.

    ``parts``: attention of the whole pass, whose rows have ``width`` tokens. No span reaches over the end of a row.
    """
    order = [(split.index - step) % split.num_parts for step in range(split.num_parts)]
    return tuple(tuple(_towards(parts, split, width, other)) for other in order)


def _towards(parts: Sequence[AttendedSpans], split: RowSplit, width: int, other: int) -> Iterator[AttendedSpans]:
    """Yield the attention of this rank's tokens to those of rank ``other``."""
    chunk = width // split.multiple
    own, their = split.chunks(split.index), split.chunks(other)
    for part in parts:
        found: dict[tuple[int, int], list[tuple[TokenSpan, TokenSpan]]] = defaultdict(list)
        for (query, queries), (key, keys) in zip(part.queries, part.keys, strict=True):
            row = query // width
            for first, of_query in enumerate(own):
                asking = _common((query - row * width, queries), of_query * chunk, chunk)
                for second, of_key in enumerate(their):
                    given = _common((key - row * width, keys), of_key * chunk, chunk)
                    is_before = not part.causal or of_key <= of_query
                    if asking is not None and given is not None and is_before:
                        at, to = ((row * len(own) + each) * chunk for each in (first, second))
                        pair = (at + asking[0], asking[1]), (to + given[0], given[1])
                        found[first, second].append(pair)
        for (first, second), pairs in found.items():
            causal = part.causal and own[first] == their[second]
            yield AttendedSpans(tuple(query for query, _ in pairs), tuple(key for _, key in pairs), causal, part.pins)


def _common(span: TokenSpan, start: int, length: int) -> TokenSpan | None:
    """Return the tokens of a span inside a chunk, counted from its start; None: there are none."""
    first, end = max(span[0], start), min(span[0] + span[1], start + length)
    return (first - start, end - first) if first < end else None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, towards: tuple[ReachedSpans, ...], split: RowSplit, scale: float
) -> Tensor:
    """Return the attention (t, H, D) of this rank's queries over the keys and values of all ranks, of which ``key`` and
    ``value`` are its own; 0 for tokens of no sequence.
    """
    out: Tensor = _RingAttention.apply(query.contiguous(), key, value, towards, split, scale)
    return out


class _RingAttention(Function):
    """Autograd function behind ``ring_attention``, with its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        towards: tuple[ReachedSpans, ...],
        split: RowSplit,
        scale: float,
    ) -> Tensor:
        # float32, since it is rounded once for each rank
        whole = torch.zeros_like(query, dtype=torch.float32)
        lse = query.new_full((query.shape[1], len(query)), NO_KEYS, dtype=torch.float32)
        travelling = torch.stack([key, value])
        for step, parts in enumerate(towards):
            arriving = _Neighbours.send(travelling, split) if step < len(towards) - 1 else None
            for part in parts:
                found = attended(query, travelling[0], travelling[1], part, scale)
                whole, lse = joined(whole, lse, found[0].float(), found[1])
                # freed before the next part is computed
                del found
            if arriving is not None:
                travelling = arriving.wait()
        out = whole.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.towards, ctx.split, ctx.scale = towards, split, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        by_out = by_out.contiguous()
        by_query = torch.zeros_like(query, dtype=torch.float32)
        travelling, returning = torch.stack([key, value]), None
        for step, parts in enumerate(ctx.towards):
            arriving = _Neighbours.send(travelling, ctx.split) if step < len(ctx.towards) - 1 else None
            by_keys = torch.zeros_like(travelling, dtype=torch.float32)
            for part in parts:
                found = gradients(by_out, query, travelling[0], travelling[1], out, lse, part, ctx.scale)
                for whole, more in zip((by_query, *by_keys), found, strict=True):
                    whole.add_(more)
                del found, more
            # of the same keys and values from the ranks before; behind the last one they are back at their own
            if returning is not None:
                by_keys += returning.wait()
                # freed before the next ones arrive
                returning = None
            returning = _Neighbours.send(by_keys, ctx.split)
            if arriving is not None:
                travelling = arriving.wait()
        assert returning is not None, "a ring has ranks"
        by_keys = returning.wait()
        return by_query.to(query.dtype), by_keys[0].to(key.dtype), by_keys[1].to(value.dtype), None, None, None


@dataclass(frozen=True)
class _Neighbours:
    """Tensor on its way from the rank before this one, while this one's is on its way to the next.

    sent:      must live until it has arrived.
    received:  filled once it has arrived.
    messages:  both, and the ranks at their other ends.
    ranks:     waits for them.
    """

    sent: Tensor
    received: Tensor
    messages: tuple[tuple[Any, tuple[int, ...]], ...]
    ranks: RankGroup

    @classmethod
    def send(cls, values: Tensor, split: RowSplit) -> _Neighbours:
        """Send ``values``, which must not change before they have arrived, to the next rank."""
        ranks, index = split.ranks.ranks, split.index
        received = torch.empty_like(values)
        after, before = ranks[(index + 1) % len(ranks)], ranks[index - 1]
        sending, receiving = exchange([(values, after)], [(received, before)], split.ranks.group)
        return cls(values, received, (*sending, *receiving), split.ranks)

    def wait(self) -> Tensor:
        """Return the tensor that was received, for work that is begun from now on: the host does not wait.

        A message that never arrives is found where the engine awaits its device (``EngineContext.await_device``).
        """
        for work, others in self.messages:
            self.ranks.wait(InOrder(work), others)
        return self.received
