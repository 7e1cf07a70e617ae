"""Prefill: prompts are read in passes of similar lengths, so that few of their tokens are padding.

Keys and values of all passes are then joined in one cache, in which every prompt ends in the same column.

transformers' own layers concatenate: each token copies the keys and values of all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from flexrlhf.memory.activations import CACHE_COLUMNS
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


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, columns, features), the filled columns of larger tensors.

    limit: columns that it has at most.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._spaces: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append columns; return all keys and values."""
        first = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._appended("keys", self.keys, key_states, first)
        self.values = self._appended("values", self.values, value_states, first)
        return self.keys, self.values

    def _appended(self, name: str, filled: Tensor, new: Tensor, first: int) -> Tensor:
        """Return the columns ``filled``, of which there are ``first``, and ``new``, in the space of that name."""
        end = first + new.shape[-2]
        space = self._spaces.get(name)
        if space is None or space.shape[-2] < end:
            columns = max(end, min(self._limit, end + CACHE_COLUMNS))
            space = new.new_empty(*new.shape[:-2], columns, new.shape[-1])
            if first:
                space[..., :first, :] = filled
            self._spaces[name] = space
        space[..., first:end, :] = new
        return space[..., :end, :]

    def place(self, keys: Tensor, values: Tensor, rows: Tensor, num_rows: int, columns: int) -> None:
        """Write keys and values (m, heads, w, features) into ``rows`` (m,), so that they end in column ``columns``.

        The columns before are zeros. Of a cache without any column, or one whose other rows were placed.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            size = (num_rows, keys.shape[1], min(self._limit, columns + CACHE_COLUMNS))
            for name, like in (("keys", keys), ("values", values)):
                self._spaces[name] = like.new_zeros(*size, like.shape[-1])
            self.keys, self.values = (self._spaces[name][..., :columns, :] for name in ("keys", "values"))
        self.keys[rows, :, columns - keys.shape[2] :] = keys
        self.values[rows, :, columns - values.shape[2] :] = values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows ``beam_idx``, in that order; the next columns have a space of their own."""
        self._spaces.clear()
        super().reorder_cache(beam_idx)


def growing_cache(config: PretrainedConfig, limit: int) -> DynamicCache:
    """Return an empty cache for at most ``limit`` columns; layers with a window or a state stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
