"""Waves of rows that are decoded together from their prompts to the last end, for caches of any kind.

Prompts are padded in front, so that all rows end in the same column, as recurrent states and windows of a cache need.

transformers' own layers concatenate: each token copies the keys and values of all before it.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from flexrlhf.engines.router_replay import Routers
from flexrlhf.memory.activations import CACHE_COLUMNS

_CACHE = "cache" if "cache" in {each.name for each in fields(BaseModelOutputWithPast)} else "past_key_values"
"""Argument of a model's forward that has its cache, as the installed transformers names it."""


class Wave:
    """Rows whose prompts ``model`` reads in one pass; after that they are read token by token.

    tokens, mask:  int64 (k, w), the prompts, left-padded.
    prompts:       int64 (m,), the prompt of each row; None: row i has prompt i.
    limit:         columns that the cache may grow to.
    routers:       of the model, whose experts are recorded; None: none are.
    columns:       w.
    experts:       of the tokens (m, tokens, layers, k) that were read last, with ``routers``.
    """

    experts: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        mask: Tensor,
        prompts: Tensor | None,
        limit: int,
        routers: Routers | None = None,
    ) -> None:
        self._model, self._tokens, self._mask, self._prompts = model, tokens, mask, prompts
        self._routers = routers
        self._cache, self.columns = growing_cache(model.config, limit), tokens.shape[1]

    def read_prompts(self) -> Tensor:
        """Return the logits (m, vocabulary) behind the prompts."""
        logits = self._call(self._tokens, (self._mask.cumsum(1) - 1).clamp(min=0))
        if self._prompts is None:
            return logits
        self.keep(self._prompts)
        if self._routers is not None:
            self.experts = self.experts[self._prompts]
        return logits[self._prompts]

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits (m, vocabulary) behind the next ``tokens`` (m,) of the rows."""
        self._mask = pad(self._mask, (0, 1), value=1)
        return self._call(tokens[:, None], self._mask.sum(1, keepdim=True) - 1)

    def keep(self, rows: Tensor) -> None:
        """Keep ``rows`` (k,), in that order, also several times."""
        self._mask = self._mask[rows]
        # reorder_cache, because batch_select_indices does not exist for every kind of layer
        self._cache.reorder_cache(rows)

    def _call(self, tokens: Tensor, positions: Tensor) -> Tensor:
        call = partial(last_logits, self._model, tokens, positions, self._mask, self._cache)
        if self._routers is None:
            return call()
        logits, experts = self._routers.recorded(call)
        self.experts = experts.unflatten(0, tokens.shape)
        return logits


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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows ``beam_idx``, in that order; the next columns have a space of their own."""
        self._spaces.clear()
        super().reorder_cache(beam_idx)


def last_logits(model: PreTrainedModel, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
    """Return the logits (m, vocabulary) behind ``tokens`` (m, w), whose keys and values ``cache`` takes."""
    out = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{_CACHE: cache},
    )
    logits: Tensor = out.logits[:, -1]
    return logits


def growing_cache(config: PretrainedConfig, limit: int) -> DynamicCache:
    """Return an empty cache for at most ``limit`` columns; layers with a window or a state stay transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer(limit) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
