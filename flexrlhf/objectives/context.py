"""Context of a combine: all that its mathematics reads in addition to the rows of its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
class CombineContext:
    """Context of a combine on this rank.

    segments: rows of each mini-batch, as slices of the batch.
    reducer:  collectives over the data-parallel group.
    state:    values of the controllers after the step before (trainer/controllers.py).
    step:     number of the step.
    seed:     of the run, for hashes of places.
    """

    segments: Sequence[slice]
    reducer: Reducer
    state: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    seed: int = 0
