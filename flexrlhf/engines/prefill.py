"""Prefill: prompts are read in passes of similar lengths, so that few of their tokens are padding.

Keys and values of all passes are then joined in one cache, in which every prompt ends in the same column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from flexrlhf.engines.growing_cache import GrowingLayer, growing_cache
from flexrlhf.memory.packed_rows import TextGroup, packed


@dataclass(frozen=True)
class _ReadPrompts:
    """Prompts that one pass has read.

    prompts:  int64 (k,), which they are.
    logits:   (k, vocabulary), of the token behind each.
    cache:    their keys and values.
    """

    prompts: Tensor
    logits: Tensor
    cache: DynamicCache


class Prefill:
    """Left-padded ``tokens`` and ``mask``, int64 (k, w), of k prompts, which are read pass by pass.

    model:  reads them.
    limit:  columns that the cache may grow to.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor, limit: int) -> None:
        self._model, self._tokens, self.mask, self._limit = model, tokens, mask, limit
        self._parts: list[_ReadPrompts] = []
        self.passes = self._passes()

    def _passes(self) -> list[Tensor]:
        """Return the prompts of each pass, all in one where a layer's cache is not ours."""
        everything = torch.arange(len(self._tokens), device=self._tokens.device)
        if not all(isinstance(layer, GrowingLayer) for layer in growing_cache(self._model.config, 1).layers):
            return [everything]
        units = tuple((TextGroup(length, (0,)),) for length in self.mask.sum(1).tolist())
        passes = packed(units, self._tokens.numel(), together=False)
        # in their own order where one pass reads all
        return [everything[list(each.units)] for each in passes] if len(passes) > 1 else [everything]

    def read(self, prompts: Tensor) -> None:
        """Run the model on ``prompts``, one of ``passes``."""
        mask = self.mask[prompts]
        first = int(mask.argmax(1).min())
        mask, tokens = mask[:, first:], self._tokens[prompts, first:]
        is_alone = len(self.passes) == 1
        cache = growing_cache(self._model.config, self._limit if is_alone else tokens.shape[1])
        out = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._parts.append(_ReadPrompts(prompts, out.logits[:, -1], cache))

    def joined(self, rows: Tensor | None) -> tuple[Tensor, DynamicCache]:
        """Return logits (m, vocabulary) and keys and values of m rows, which are not kept here.

        ``rows``: int64 (m,), the prompt of each row; None: row i has prompt i.
        """
        parts, self._parts = self._parts, []
        if len(parts) == 1:
            (part,) = parts
            if rows is None:
                return part.logits, part.cache
            part.cache.reorder_cache(rows)
            return part.logits[rows], part.cache
        if rows is None:
            rows = torch.arange(len(self._tokens), device=self._tokens.device)
        logits = torch.cat([part.logits for part in parts])
        order = torch.cat([part.prompts for part in parts]).argsort()
        return logits[order[rows]], self._joined_cache(parts, rows)

    def _joined_cache(self, parts: Sequence[_ReadPrompts], rows: Tensor) -> DynamicCache:
        """Return the keys and values of ``parts`` for ``rows``. Takes them out of the parts, layer by layer."""
        cache = growing_cache(self._model.config, self._limit)
        places = [_places(part.prompts, rows, len(self._tokens)) for part in parts]
        for number, layer in enumerate(cache.layers):
            for part, (at, index) in zip(parts, places, strict=True):
                read = part.cache.layers[number]
                layer.place(read.keys[index], read.values[index], at, len(rows), self.mask.shape[1])
                read.keys = read.values = None
        return cache


def _places(prompts: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rows that have one of ``prompts``, and which of these each has. ``count``: of all prompts."""
    index = torch.full((count,), -1, device=rows.device)
    index[prompts] = torch.arange(len(prompts), device=rows.device)
    at = (index[rows] >= 0).nonzero().squeeze(1)
    return at, index[rows[at]]
