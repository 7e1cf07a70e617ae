"""Context of a combine: all that its mathematics reads in addition to the rows of its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Columns = dict[str, Tensor]
"""Column name → tensor (n, ...)."""


class Reducer(Protocol):
    """Collectives over the data-parallel group of the rows, which all of its ranks call."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over the group, in place."""
        ...

    def gather(self, vector: Tensor) -> Tensor:
        """Concatenate int64 vectors of any lengths, without negative values, over the group."""
        ...


@dataclass(frozen=True)
class EarlierScores:
    """Scores of the responses to the prompts of a batch that were trained on in earlier steps.

    columns: by name, (g, s) or (g, s, R), of the groups that the batch has rows of; NaN of responses without one.
    places:  int64 (n,), of the batch's rows among the g * s.
    """

    columns: Columns
    places: Tensor

    def completed(self, name: str, values: Tensor, counts: Tensor) -> Tensor:
        """Return the column ``name`` with the ``values`` (n, ...) of the batch's rows that count, bool (n,)."""
        own = values.float()
        own = own.where(counts.view(-1, *[1] * (own.dim() - 1)), torch.nan)
        return self.columns[name].flatten(0, 1).index_copy(0, self.places, own).view(self.columns[name].shape)


@dataclass(frozen=True)
class CombineContext:
    """Context of a combine on this rank.

    segments: rows of each mini-batch, as slices of the batch.
    reducer:  collectives over the data-parallel group.
    state:    values of the controllers after the step before (trainer/controllers.py).
    step:     number of the step.
    seed:     of the run, for hashes of places.
    earlier:  scores of responses that ended before those of the batch; None: the batch has whole groups.
    has_surplus: whether dynamic sampling takes groups beyond a mini-batch's share, which are left out.
    """

    segments: Sequence[slice]
    reducer: Reducer
    state: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    seed: int = 0
    earlier: EarlierScores | None = None
    has_surplus: bool = True
