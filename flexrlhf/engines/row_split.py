"""Split of the rows of a pass over context-parallel ranks, each of which computes a part of the tokens of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flexrlhf.comm.reduce import RankGroup, Summed
from flexrlhf.engines.base import EngineContext


@dataclass(frozen=True)
class RowSplit:
    """Split of a row over context-parallel ranks.

    ranks:      the context-parallel group.
    index:      number of this rank in it.
    is_zigzag:  whether a part is a chunk of the first half of a row and its mirror image in the second, which have
                together as many tokens before them as those of any other rank; else it is one chunk.
    """

    ranks: RankGroup
    index: int
    is_zigzag: bool

    @classmethod
    def of(cls, context: EngineContext, config: Any) -> RowSplit | None:
        """Return the split of rows over the context-parallel ranks of a model; None if it has one alone."""
        copies = context.ranks.copies
        if copies is None or "cp" not in copies.along:
            return None
        ranks = copies.along["cp"]
        assert ranks.group is not None, "context-parallel ranks are several"
        return cls(ranks, dist.get_rank(ranks.group), context.placed.settings.is_ring(config.num_attention_heads))

    @property
    def num_parts(self) -> int:
        return len(self.ranks.ranks)

    @property
    def multiple(self) -> int:
        """Number that the tokens of a row are a multiple of."""
        return self.num_parts * (1 + self.is_zigzag)

    def chunks(self, index: int) -> tuple[int, ...]:
        """Return the chunks, of ``multiple`` in a row, that part ``index`` has, ascending."""
        return (index, self.multiple - 1 - index) if self.is_zigzag else (index,)

    def columns(self, width: int, index: int) -> NDArray[np.int64]:
        """Return the columns of a row of ``width`` tokens that part ``index`` has, ascending."""
        return np.arange(width).reshape(self.multiple, -1)[list(self.chunks(index))].flatten()

    def rows(self, count: int, samples: int) -> slice:
        """Return the rows, of ``count`` with ``samples`` of each prompt, perhaps fewer of the last, to which this rank
        generates: as many prompts as the others, up to one."""
        prompts = -(-count // samples)
        bounds = (prompts * each // self.num_parts for each in (self.index, self.index + 1))
        return slice(*(bound * samples for bound in bounds))

    def part(
        self, width: int, predicting: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the columns of this rank's part, and of its tokens that predict response tokens the places in the
        flattened m x w, and their numbers in ``predicting``, the places of all of them in the flattened m x W.
        """
        columns = self.columns(width, self.index)
        own = np.full(width, -1)
        own[columns] = np.arange(len(columns))
        rows, at = predicting // width, own[predicting % width]
        (numbers,) = np.nonzero(at >= 0)
        return columns, (rows * len(columns) + at)[numbers], numbers


@dataclass(frozen=True)
class RowPart:
    """Part of the rows of a pass on this rank.

    columns:  int64 (w,), its columns of the W of a row, ascending.
    places:   int64 (j,), places of its tokens that predict response tokens, in the flattened m x w.
    scored:   int64 (j,), numbers of these tokens among all that do.
    ranks:    ranks that have the other parts.
    """

    columns: Tensor
    places: Tensor
    scored: Tensor
    ranks: RankGroup

    def join(self, values: Tensor, dim: int, at: Tensor, size: int) -> Tensor:
        """Return ``values`` of all parts, of which this rank's are ``at`` these places of the ``size`` along ``dim``.

        All ranks get them, and each computes the same from them, so the gradient of its own is that of its own result.
        """
        shape = [*values.shape]
        shape[dim] = size
        assert self.ranks.group is not None, "parts of a row are on several ranks"
        whole: Tensor = Summed.apply(values.new_zeros(shape).index_copy(dim, at, values), self.ranks.group)
        return whole
