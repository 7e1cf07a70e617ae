"""Free the weights of a copy between two Syncs, without a copy of them anywhere."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from flexrlhf.engines.host_offload import storages_of


class ReleasedWeights:
    """Live weights of an engine without memory. Storages are freed, so views that share one keep sharing it."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        """Free the memory of ``weights``, which are those of ``Engine.weights``."""
        self._freed = [(storage, storage.nbytes()) for storage in storages_of(weights)]
        for storage, _ in self._freed:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again, without numbers: whoever calls this overwrites all of the weights."""
        for storage, size in self._freed:
            storage.resize_(size)
