"""Offload tensors to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _OffloadedStorage:
    """A freed storage and the copy of its bytes in host memory."""

    storage: torch.UntypedStorage
    copy: torch.UntypedStorage


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages behind ``tensors``, each once."""
    return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    return sum(storage.nbytes() for storage in storages_of(tensors))


class HostOffload:
    """Tensors of one engine in host memory. Storages are moved, so views and shards that share one keep sharing it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._offloaded: list[_OffloadedStorage] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are offloaded now."""
        return sum(item.copy.nbytes() for item in self._offloaded)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of ``tensors`` to host memory and free them. May not be called twice without ``reload``."""
        assert not self._offloaded, "already offloaded"
        for storage in storages_of(tensors):
            if storage.device.type != self._device.type:
                continue  # in host memory already
            # copied on a CPU too, where it saves nothing but runs the same way
            copy = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            self._offloaded.append(_OffloadedStorage(storage, copy))
            storage.resize_(0)

    def readable(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or while it is offloaded the same numbers in host memory."""
        storage = tensor.untyped_storage()
        copies = [item.copy for item in self._offloaded if item.storage._cdata == storage._cdata]
        if not copies:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(copies[0], tensor.storage_offset(), tensor.size(), tensor.stride())

    def reload(self) -> None:
        """Allocate the storages again and copy their bytes back."""
        for item in self._offloaded:
            item.storage.resize_(item.copy.nbytes())
            item.storage.copy_(item.copy)
        self._offloaded.clear()
