"""Put tensors away in host memory and take them back: what offload and reload of an engine share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _OffloadedStorage:
    storage: torch.UntypedStorage
    copy: torch.UntypedStorage


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind ``tensors``, each piece once."""
    return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in _storages(tensors))


class HostOffload:
    """Storages, not tensors, are put away: views and shards that share one keep sharing it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offloaded: list[_OffloadedStorage] = []

    @property
    def num_bytes(self) -> int:
        return sum(item.copy.nbytes() for item in self._offloaded)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy to host memory and free the device's."""
        assert not self._offloaded, "already offloaded"
        for storage in _storages(tensors):
            if storage.device.type != self._device.type:
                continue  # in host memory anyway
            # a copy on the CPU too, where it saves nothing but runs the same way
            copy = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            self._offloaded.append(_OffloadedStorage(storage, copy))
            storage.resize_(0)

    def reload(self) -> None:
        """Allocate on the device again and copy back."""
        for item in self._offloaded:
            item.storage.resize_(item.copy.nbytes())
            item.storage.copy_(item.copy)
        self._offloaded.clear()
