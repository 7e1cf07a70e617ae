"""Weights that a copy and its source store once on this rank (``weights/reuse.py``), while the copy exists.

Tensors of the copy become views of the source's, or the source's are moved into them and back, group by group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flexrlhf.comm.weights import view_of
from flexrlhf.engines.base import Engine
from flexrlhf.engines.host_offload import storages_of
from flexrlhf.weights.reuse import Reuse

Sized = tuple[torch.UntypedStorage, int]
"""A storage, and its bytes while it is not freed."""


class ReusedWeights:
    """Weights of a copy that exists from a Sync to a Release.

    lent:  tensors of the source that the copy stores meanwhile, by name, as parts of its own.
    """

    def __init__(self, copy: Engine, reuse: Reuse) -> None:
        """Free the memory of the copy's weights that it has in common with its source."""
        self._copy, self._reuse = copy, reuse
        self._source: Engine | None = None
        self.lent: dict[str, Tensor] = {}
        # by tensor, memory of the copy that the engine itself does not free and allocate
        self._containing = {name: _sized([tensor]) for name, tensor in copy.lend(sorted(reuse.lent)).items()}
        for sized in self._containing.values():
            _free(sized)
        self._drop_views()
        # by group, tensors of the source and their storages
        self._moved: list[tuple[dict[str, Tensor], list[Sized]]] = []

    @torch.no_grad()
    def take(self, source: Engine) -> None:
        """Give the copy the weights in common; ``source`` is on the device, and other weights of the copy have
        memory."""
        reuse, self._source = self._reuse, source
        stored = source.lend([*reuse.views, *reuse.lent])
        self._copy.point_to(
            {name: view_of(stored[name], reuse.source_parts[name], reuse.parts[name].box) for name in reuse.views}
        )
        own = self._copy.weights()
        for group in reuse.groups:
            tensors = {name: stored[name] for name in group}
            for name, tensor in tensors.items():
                _allocate(self._containing[name])
                self.lent[name] = view_of(own[name], reuse.parts[name], reuse.source_parts[name].box)
                self.lent[name].copy_(tensor.view(self.lent[name].shape))
            storages = _sized(tensors.values())
            _free(storages)
            self._moved.append((tensors, storages))

    @torch.no_grad()
    def give_back(self) -> None:
        """Free the memory of the weights in common; the source has its own again. Nothing if it has them."""
        if self._source is None:
            return
        for tensors, storages in self._moved:
            _allocate(storages)
            for name, tensor in tensors.items():
                tensor.copy_(self.lent.pop(name).view(tensor.shape))
                _free(self._containing[name])
            self._source.take_back(list(tensors.values()))
        self._moved.clear()
        self._drop_views()
        self._source.take_back()
        self._source = None

    def _drop_views(self) -> None:
        own = self._copy.weights()
        self._copy.point_to({name: own[name].new_empty(0) for name in self._reuse.views})


def _sized(tensors: Iterable[Tensor]) -> list[Sized]:
    return [(storage, storage.nbytes()) for storage in storages_of(tensors)]


def _free(storages: Iterable[Sized]) -> None:
    for storage, _ in storages:
        storage.resize_(0)


def _allocate(storages: Iterable[Sized]) -> None:
    for storage, size in storages:
        storage.resize_(size)
