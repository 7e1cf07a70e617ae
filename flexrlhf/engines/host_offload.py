"""Offload tensors to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _OffloadedStorage:
    """A freed storage of ``num_bytes``, and the copy of them in host memory, where they are kept."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: torch.UntypedStorage | None


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
        return sum(item.num_bytes for item in self._offloaded if item.copy is not None)

    def offload(self, tensors: Iterable[Tensor], keeps: bool = True) -> None:
        """Copy the storages of ``tensors`` to host memory and free them; without ``keeps`` free them alone.

        May not be called twice without ``reload``.
        """
        assert not self._offloaded, "already offloaded"
        for storage in storages_of(tensors):
            if storage.device.type != self._device.type:
                continue  # in host memory already
            # copied on a CPU too, where it saves nothing but runs the same way
            copy = (storage.clone() if storage.device.type == "cpu" else storage.cpu()) if keeps else None
            self._offloaded.append(_OffloadedStorage(storage, storage.nbytes(), copy))
            storage.resize_(0)

    def readable(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or while it is offloaded the same numbers in host memory."""
        storage = tensor.untyped_storage()
        copies = [item.copy for item in self._offloaded if item.storage._cdata == storage._cdata]
        if not copies or copies[0] is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(copies[0], tensor.storage_offset(), tensor.size(), tensor.stride())

    def reload(self) -> None:
        """Allocate the storages again and copy back the bytes that were kept."""
        for item in self._offloaded:
            item.storage.resize_(item.num_bytes)
            if item.copy is not None:
                item.storage.copy_(item.copy)
        self._offloaded.clear()
