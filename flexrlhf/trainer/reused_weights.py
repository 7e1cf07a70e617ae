"""Weights that a copy and its source store once on this rank (``weights/reuse.py``), while the copy exists.

Tensors of the copy become views of the source's, or the source's are moved into them and back, one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexrlhf.comm.weights import view_of
from flexrlhf.engines.base import Engine
from flexrlhf.weights.reuse import Reuse


class ReusedWeights:
    """Weights of a copy that exists from a Sync to a Release.

    lent:  tensors of the source that the copy stores meanwhile, by name, as parts of its own.
    """

    def __init__(self, copy: Engine, reuse: Reuse) -> None:
        """Free the memory of the copy's weights that it has in common with its source."""
        self._copy, self._reuse = copy, reuse
        self._source: Engine | None = None
        # the copy's storages that will contain tensors of the source, with their bytes; they are not its own to offload
        self._containing = {name: _sized(tensor) for name, tensor in copy.lend(sorted(reuse.lent)).items()}
        for storage, _ in self._containing.values():
            storage.resize_(0)
        self._drop_views()
        # tensors of the source, with the bytes of their storages
        self._moved: dict[str, tuple[Tensor, int]] = {}
        self.lent: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, source: Engine) -> None:
        """Give the copy the weights in common; ``source`` is on the device."""
        reuse, self._source = self._reuse, source
        stored = source.lend([*reuse.views, *reuse.lent])
        self._copy.point_to(
            {name: view_of(stored[name], reuse.source_parts[name], reuse.parts[name].box) for name in reuse.views}
        )
        own = self._copy.weights()
        for name, (containing, size) in self._containing.items():
            containing.resize_(size)
            self.lent[name] = view_of(own[name], reuse.parts[name], reuse.source_parts[name].box)
            self.lent[name].copy_(stored[name].view(self.lent[name].shape))
            storage, freed = _sized(stored[name])
            self._moved[name] = stored[name], freed
            storage.resize_(0)

    @torch.no_grad()
    def give_back(self) -> None:
        """Free the memory of the weights in common; the source has its own again. Nothing if it has them."""
        if self._source is None:
            return
        for name, (stored, size) in self._moved.items():
            stored.untyped_storage().resize_(size)
            stored.copy_(self.lent.pop(name).view(stored.shape))
            self._containing[name][0].resize_(0)
            self._source.take_back([stored])
        self._moved.clear()
        self._drop_views()
        self._source.take_back()
        self._source = None

    def _drop_views(self) -> None:
        own = self._copy.weights()
        self._copy.point_to({name: own[name].new_empty(0) for name in self._reuse.views})


def _sized(tensor: Tensor) -> tuple[torch.UntypedStorage, int]:
    """Return the storage of ``tensor`` and its bytes."""
    storage = tensor.untyped_storage()
    return storage, storage.nbytes()
