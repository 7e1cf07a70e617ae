"""What the mathematics of a combine sees besides the rows of its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

Columns = dict[str, Tensor]


class Reducer(Protocol):
    """Sums and gathers over the replicas that hold the rows."""

    def sum(self, tensor: Tensor) -> Tensor: ...

    def gather(self, vector: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class CombineContext:
    """``segments``: the rows of each mini-batch. ``state``: of the controllers, as the step before has left it."""

    segments: Sequence[slice]
    reducer: Reducer
    state: Mapping[str, float] = field(default_factory=dict)
