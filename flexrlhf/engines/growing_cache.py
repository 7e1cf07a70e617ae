"""KV cache whose columns are appended in place, in space for several tokens at a time.

transformers' own layers concatenate: each token copies the keys and values of all before it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from flexrlhf.memory.activations import CACHE_COLUMNS


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
