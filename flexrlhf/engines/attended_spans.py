"""Attention of spans of queries to spans of keys, forward and backward: what kernels compute of it.

All tensors are flat: queries (T, H, D), keys and values (S, K, D), with K a divisor of H, log-sum-exps (H, T). The
attention of a token may have several parts, each over other keys: ``attended`` returns a part with its log-sum-exp,
``joined`` weighs two parts, and ``gradients`` returns the gradients through one part, from the output and the
log-sum-exp of all parts joined. So each part may be computed when its keys arrive, for example from another rank.

On GPUs since Ampere, in 16 bits, one call of flash attention's variable-length kernel computes all spans. Elsewhere
spans of the same length at the same distance are one call of torch's kernel for equal lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ops = torch.ops.aten
NO_KEYS = -1e30
"""Log-sum-exp of a token that attends to nothing; finite, so that differences are numbers."""
FLASH_TYPES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
FLASH_HEAD_DIM = 256
"""Most features of a head; a multiple of 8."""
MASK_STRIDE = 8
"""Elements of which strides of a mask are multiples in the CUDA kernel for equal lengths: 16 bytes of 16-bit types."""

TokenSpan = tuple[int, int]
"""First token and number of tokens."""


class _Alike(NamedTuple):
    """Spans of equal lengths at equal distances: the first place, length and distance of queries, those of keys."""

    number: int
    query: int
    queries: int
    query_step: int
    key: int
    keys: int
    key_step: int


class _Offsets(NamedTuple):
    """Spans for a variable-length kernel, on a device: int32 ends of spans, and the places of tokens; None: all."""

    query_ends: Tensor
    key_ends: Tensor
    query_places: Tensor | None
    key_places: Tensor | None


@dataclass(frozen=True, eq=False)
class AttendedSpans:
    """Spans of queries, each of which attends to one span of keys.

    queries:  spans that do not overlap, in order.
    keys:     the span of keys of each, none of which overlap.
    causal:   whether query i of a span attends to its keys 0 to i, as many as its queries; else to all of them.
    pins:     whether host memory is pinned that a GPU copies from.
    """

    queries: tuple[TokenSpan, ...]
    keys: tuple[TokenSpan, ...]
    causal: bool
    pins: bool = True
    _on_devices: dict[torch.device, _Offsets] = field(default_factory=dict, repr=False)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        each = ((q, k) for (_, q), (_, k) in zip(self.queries, self.keys, strict=True))
        return sum(q * (q + 1) // 2 if self.causal else q * k for q, k in each)

    @cached_property
    def alike(self) -> tuple[_Alike, ...]:
        """The spans in as few groups of equal lengths and distances as a greedy walk finds."""
        found: list[_Alike] = []
        for (query, queries), (key, keys) in zip(self.queries, self.keys, strict=True):
            last = found[-1] if found else None
            if last is None or (last.queries, last.keys) != (queries, keys):
                found.append(_Alike(1, query, queries, queries, key, keys, keys))
            elif last.number == 1:
                found[-1] = last._replace(number=2, query_step=query - last.query, key_step=key - last.key)
            elif (query, key) == (last.query + last.number * last.query_step, last.key + last.number * last.key_step):
                found[-1] = last._replace(number=last.number + 1)
            else:
                found.append(_Alike(1, query, queries, queries, key, keys, keys))
        return tuple(found)

    def offsets(self, device: torch.device, queries: int, keys: int) -> _Offsets:
        """Return the spans for a variable-length kernel over so many queries and keys, once for each device."""
        if device not in self._on_devices:
            found = _ends(self.queries), _ends(self.keys), _places(self.queries, queries), _places(self.keys, keys)
            self._on_devices[device] = _Offsets(*(copied_to(device, each, self.pins) for each in found))
        return self._on_devices[device]


def copied_to(device: torch.device, values: Any, pins: bool) -> Any:
    """Return ``values`` on a device, which the host does not wait for. ``pins``: whether from pinned memory."""
    if values is None or device.type == "cpu":
        return values
    return (values.pin_memory() if pins else values).to(device, non_blocking=True)


def _ends(spans: Sequence[TokenSpan]) -> Tensor:
    return torch.tensor([0, *accumulate(length for _, length in spans)], dtype=torch.int32)


def _places(spans: Sequence[TokenSpan], tokens: int) -> Tensor | None:
    """Return the places of all tokens of ``spans``, int64; None if these are all ``tokens``."""
    if sum(length for _, length in spans) == tokens:
        return None
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


def attended(query: Tensor, key: Tensor, value: Tensor, spans: AttendedSpans, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention (T, H, D) of queries to the keys of their spans, and its log-sum-exp (H, T), float32.

    Both are 0 and ``NO_KEYS`` for queries in no span.
    """
    if has_flash(query):
        return _flash(query, key, value, spans, scale)
    out = query.new_zeros(query.shape)
    lse = query.new_full((query.shape[1], len(query)), NO_KEYS, dtype=torch.float32)
    for calls in _calls(query, key, spans):
        part, part_lse = dense(calls.query(query), calls.key(key), calls.key(value), spans.causal, scale)
        calls.query(out).copy_(part)
        calls.lse(lse).copy_(part_lse)
    return out, lse


def gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: AttendedSpans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values through the part of attention that ``spans`` are.

    gradient:  of the whole attention (T, H, D).
    out, lse:  of the whole attention, after all parts are joined.
    """
    if has_flash(query):
        return _flash_gradients(gradient, query, key, value, out, lse, spans, scale)

    def found(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
        of_query, of_key, of_value = dense_gradients(
            call.query(gradient),
            call.query(query),
            call.key(key),
            call.key(value),
            call.query(out),
            call.lse(lse),
            spans.causal,
            scale,
        )
        return of_query, call.summed(of_key), call.summed(of_value)

    if (only := _only_call(query, key, spans)) is not None:
        of_query, of_key, of_value = map(_flat, found(only))
        return of_query, of_key, of_value
    grads = query.new_zeros(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    for call in _calls(query, key, spans):
        of_query, *of_keys = found(call)
        call.query(grads[0]).copy_(of_query)
        for whole, part in zip(grads[1:], of_keys, strict=True):
            call.key(whole, reduces=True).copy_(part)
    return grads


def joined(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return two parts of the same queries as one: outputs (T, H, D) and log-sum-exps (H, T).

    The output is in the memory of ``out``; ``other`` is overwritten.
    """
    share = (other_lse - lse).sigmoid_().to(out.dtype).t()[..., None]
    return out.add_(other.sub_(out).mul_(share)), torch.logaddexp(lse, other_lse)


def has_flash(query: Tensor) -> bool:
    """Whether flash attention's variable-length kernel computes ``query``."""
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype in FLASH_TYPES
        and query.shape[-1] <= FLASH_HEAD_DIM
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= FLASH_CAPABILITY
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, spans: AttendedSpans, scale: float) -> tuple[Tensor, Tensor]:
    at = spans.offsets(query.device, len(query), len(key))
    parts = _taken(query, at.query_places), _taken(key, at.key_places), _taken(value, at.key_places)
    out, lse, *_ = ops._flash_attention_forward(*parts, *_lengths(spans, at), 0.0, spans.causal, False, scale=scale)
    if at.query_places is None:
        return out, lse
    whole = query.new_zeros(query.shape).index_copy_(0, at.query_places, out)
    no_keys = lse.new_full((query.shape[1], len(query)), NO_KEYS)
    return whole, no_keys.index_copy_(1, at.query_places, lse)


def _flash_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: AttendedSpans,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    at = spans.offsets(query.device, len(query), len(key))
    places = at.query_places, at.query_places, at.key_places, at.key_places, at.query_places
    parts = (_taken(tensor, where) for tensor, where in zip((gradient, query, key, value, out), places, strict=True))
    lse = lse if at.query_places is None else lse.index_select(1, at.query_places)
    # state of random numbers, which only dropout reads
    unread = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
    found = ops._flash_attention_backward(
        *parts, lse.contiguous(), *_lengths(spans, at), 0.0, spans.causal, *unread, scale=scale
    )
    of_query, of_key, of_value = found
    return (
        _given(of_query, at.query_places, query),
        _given(of_key, at.key_places, key),
        _given(of_value, at.key_places, value),
    )


def _lengths(spans: AttendedSpans, at: _Offsets) -> tuple[Tensor, Tensor, int, int]:
    queries, keys = (max(length for _, length in each) for each in (spans.queries, spans.keys))
    return at.query_ends, at.key_ends, queries, keys


def _taken(tensor: Tensor, places: Tensor | None) -> Tensor:
    return tensor.contiguous() if places is None else tensor.index_select(0, places)


def _given(part: Tensor, places: Tensor | None, like: Tensor) -> Tensor:
    return part if places is None else like.new_zeros(like.shape).index_copy_(0, places, part)


@dataclass(frozen=True)
class _Call:
    """One call of a kernel for equal lengths: views of flat tensors, of ``alike`` spans.

    Heads that share keys (``group`` of them) are rows of the call if it has one span, whose keys are then not copied.
    """

    alike: _Alike
    group: int

    def query(self, flat: Tensor) -> Tensor:
        """Return queries (rows, heads, length, D) of (T, H, D)."""
        return self._view(flat, self.alike.query, self.alike.queries, self.alike.query_step)

    def lse(self, flat: Tensor) -> Tensor:
        """Return log-sum-exps (rows, heads, length) of (H, T)."""
        return self.query(flat.t()[..., None]).squeeze(-1)

    def key(self, flat: Tensor, reduces: bool = False) -> Tensor:
        """Return keys (rows, heads, length, D) of (S, K, D), for each head of a group; once where it ``reduces``."""
        alike = self.alike
        group = 1 if reduces else self.group
        length, heads, features = flat.stride()
        start, step = flat.storage_offset() + alike.key * length, alike.key_step * length
        if alike.number == 1:
            size, stride = (group, flat.shape[1], alike.keys, flat.shape[2]), (0, heads, length, features)
            return flat.as_strided(size, stride, start)
        whole = (alike.number, flat.shape[1], group, alike.keys, flat.shape[2])
        return flat.as_strided(whole, (step, heads, 0, length, features), start).flatten(1, 2)

    def summed(self, part: Tensor) -> Tensor:
        """Return gradients of keys (rows, heads, length, D), summed over the heads of each group."""
        if self.group == 1:
            return part
        if self.alike.number == 1:
            return part.sum(0, keepdim=True)
        return part.unflatten(1, (-1, self.group)).sum(2)

    def _view(self, flat: Tensor, first: int, length: int, step: int) -> Tensor:
        each, heads, features = flat.stride()
        start = flat.storage_offset() + first * each
        if self.alike.number == 1:
            size = self.group, flat.shape[1] // self.group, length, flat.shape[2]
            return flat.as_strided(size, (heads, heads * self.group, each, features), start)
        size = self.alike.number, flat.shape[1], length, flat.shape[2]
        return flat.as_strided(size, (step * each, heads, each, features), start)


def _calls(query: Tensor, key: Tensor, spans: AttendedSpans) -> Iterator[_Call]:
    for alike in spans.alike:
        yield _Call(alike, query.shape[1] // key.shape[1])


def _only_call(query: Tensor, key: Tensor, spans: AttendedSpans) -> _Call | None:
    """Return the call whose gradients are those of all queries and keys in order, which need no copy; or None."""
    if len(spans.alike) != 1:
        return None
    (call,) = _calls(query, key, spans)
    number, queries, keys = call.alike.number, call.alike.queries, call.alike.keys
    in_order = call.alike == _Alike(number, 0, queries, queries, 0, keys, keys)
    is_all = (number * queries, number * keys) == (len(query), len(key))
    return call if in_order and is_all and (number > 1 or call.group == 1) else None


def _flat(part: Tensor) -> Tensor:
    """Return results (rows, heads, length, D) of a call as (T, heads, D)."""
    return part.transpose(1, 2).flatten(0, 1)


def dense(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp of tensors (rows, heads, length, D). ``mask``: added to scores."""
    if not query.is_cuda:
        found: tuple[Tensor, Tensor] = ops._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return found
    bias = None if mask is None else _bias(mask, query.shape[1])
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, causal, scale=scale)
    return out, lse.narrow(-1, 0, query.shape[2])


def _bias(mask: Tensor, heads: int) -> Tensor:
    """Return ``mask`` (rows, 1 or heads, length, keys) for all ``heads``, with the strides that the CUDA kernel takes.

    torch's own attention pads masks before it calls the kernel; prompts and growing caches have any width.
    """
    width, last = mask.shape[-1], mask.stride(-1)
    if last != 1 or any(each % MASK_STRIDE for each in (*mask.stride()[:-1], mask.storage_offset())):
        mask = pad(mask, (0, MASK_STRIDE - width % MASK_STRIDE)).narrow(-1, 0, width)
    return mask.expand(-1, heads, -1, -1)


def dense_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values of ``dense``, whose result is joined with others."""
    if not query.is_cuda:
        found: tuple[Tensor, Tensor, Tensor] = ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return found
    # the kernel reads log-sum-exps of a multiple of 32 queries
    lse = pad(lse, (0, -lse.shape[2] % 32)).contiguous()
    unread = torch.zeros((), dtype=torch.int64, device=query.device)
    bias = None if mask is None else _bias(mask, query.shape[1])
    needed = [True, True, True, False]
    of_query, of_key, of_value, _ = ops._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, bias, out, lse, unread, unread, 0.0, needed, causal, scale=scale
    )
    return of_query, of_key, of_value
