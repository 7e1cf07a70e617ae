"""Attention of the sequences in a pass, by their places instead of a mask; registered with transformers as a function.

``PassAttention`` describes which tokens of a pass attend to which, in numbers that the host has, made once per pass.
The model receives it as the argument ``attended``, which transformers passes to each layer, and so to
``transformers_attention``. A model that is called without it, as in decoding, uses transformers' own sdpa.

``attend`` is the same for any caller with flat tensors: queries (T, H, D), keys and values (T, K, D). H and K may be a
part of the model's heads. A caller whose keys come in parts, from other ranks or later, uses ``attended``, ``joined``
and ``gradients`` of ``attended_spans.py``, as ``_Attention`` here does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flexrlhf.engines.attended_spans import AttendedSpans, TokenSpan, attended, gradients, joined

BY_SEQUENCES = "by_sequences"
"""Name of the attention function in transformers."""


class SharedAttention(Protocol):
    """Attention of the tokens of a pass that this rank has."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return attention (m, W, H, D) of queries (m, H, W, D) and keys and values (m, K, W, D), as ``attend``."""
        ...


@dataclass(frozen=True, eq=False)
class PassAttention:
    """Tokens of a pass, of its rows one behind the other, that attend to each other.

    parts:  a token attends to the keys of its spans in all parts, no key twice. The first part has every token that
            attends to anything.
    """

    parts: tuple[AttendedSpans, ...]

    @classmethod
    def of(
        cls, own: list[TokenSpan], responses: list[TokenSpan], prompts: list[TokenSpan], pins: bool = True
    ) -> PassAttention:
        """Return the attention of sequences and of shared prompts.

        own:        sequences, prompts and responses that each attend causally to themselves.
        responses:  all responses, neighbours, to each shared prompt.
        prompts:    the shared prompt of each, to which they all attend, too.
        pins:       of ``AttendedSpans``.
        """
        parts = [AttendedSpans(tuple(own), tuple(own), causal=True, pins=pins)]
        if prompts:
            parts.append(AttendedSpans(tuple(responses), tuple(prompts), causal=False, pins=pins))
        return cls(tuple(parts))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        return sum(part.pairs for part in self.parts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        out: Tensor = attend(flat[0], flat[1], flat[2], self, scale)
        return out.unflatten(0, (len(query), -1))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(query: Tensor, key: Tensor, value: Tensor, sequences: PassAttention, scale: float | None = None) -> Tensor:
    """Return the attention (T, H, D) of queries (T, H, D) to keys and values (T, K, D); 0 for tokens of no sequence.

    scale: of the scores; None: the root of 1/D.
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    out: Tensor = _Attention.apply(query, key, value, sequences, query.shape[-1] ** -0.5 if scale is None else scale)
    return out


class _Attention(torch.autograd.Function):
    """Parts of attention, joined; the backward pass computes each part's gradients from the joined result."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: PassAttention, scale: float) -> Tensor:
        first, *others = sequences.parts
        out, lse = attended(query, key, value, first, scale)
        for part in others:
            out, lse = joined(out, lse, *attended(query, key, value, part, scale))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.sequences, ctx.scale = sequences, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # read once, as checkpointing requires
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = ctx.saved_tensors
        first, *others = ctx.sequences.parts
        found = gradients(gradient, *saved, first, ctx.scale)
        for part in others:
            for whole, more in zip(found, gradients(gradient, *saved, part, ctx.scale), strict=True):
                whole.add_(more)
        return *found, None, None


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attended: SharedAttention | None = None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Return attention (m, W, H, D), and no weights, of queries (m, H, W, D) and keys and values (m, K, W, D)."""
    if attended is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **arguments)
    return attended.attend(query, key, value, scaling), None


AttentionInterface.register(BY_SEQUENCES, transformers_attention)
# for calls without ``attended``
AttentionMaskInterface.register(BY_SEQUENCES, sdpa_mask)
