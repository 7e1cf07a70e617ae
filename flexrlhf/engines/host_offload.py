"""Offload tensors to host memory and back.

The host memory is kept for the next time: to allocate and to pin it takes longer than the copies. It is pinned on CUDA
in its own size, which torch's pinned memory would round up to a power of two.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _OffloadedStorage:
    """A freed storage of ``num_bytes``, and the copy of them in host memory (uint8), where they are kept."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: Tensor | None


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
        self._is_offloaded, self._keeps = False, True
        self._lent: dict[int, torch.UntypedStorage] = {}
        self._unused: defaultdict[int, list[Tensor]] = defaultdict(list)  # host memory by size

    @property
    def num_bytes(self) -> int:
        """Bytes that are offloaded now."""
        return sum(item.num_bytes for item in self._offloaded if item.copy is not None)

    def offload(self, tensors: Iterable[Tensor], keeps: bool = True) -> None:
        """Copy the storages of ``tensors`` to host memory and free them; without ``keeps`` free them alone.

        Storages that are lent stay until ``take_back``. May not be called twice without ``reload``.
        """
        assert not self._is_offloaded, "already offloaded"
        self._is_offloaded, self._keeps = True, keeps
        self._offload(each for each in storages_of(tensors) if each._cdata not in self._lent)

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of ``tensors`` to others, until ``take_back``."""
        self._lent |= {storage._cdata: storage for storage in storages_of(tensors)}

    def take_back(self, tensors: Iterable[Tensor] | None) -> None:
        """Take back the storages of ``tensors``, which have their values; None: all that are lent."""
        storages = list(self._lent.values()) if tensors is None else storages_of(tensors)
        for storage in storages:
            del self._lent[storage._cdata]
        if self._is_offloaded:
            self._offload(storages)

    def _offload(self, storages: Iterable[torch.UntypedStorage]) -> None:
        freed = []
        for storage in storages:
            if storage.device.type != self._device.type:
                continue  # in host memory already
            copy = self._copy_of(storage) if self._keeps else None
            freed.append(_OffloadedStorage(storage, storage.nbytes(), copy))
        if self._keeps and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        for item in freed:
            item.storage.resize_(0)
        self._offloaded += freed

    def readable(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or while it is offloaded its copy in host memory."""
        storage = tensor.untyped_storage()
        copies = [item.copy for item in self._offloaded if item.storage._cdata == storage._cdata]
        if not copies or copies[0] is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(copies[0].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def reload(self) -> None:
        """Allocate the storages again and copy back the bytes that were kept."""
        for item in self._offloaded:
            item.storage.resize_(item.num_bytes)
            if item.copy is not None:
                item.storage.copy_(item.copy.untyped_storage(), non_blocking=True)
                self._unused[item.num_bytes].append(item.copy)
        self._offloaded.clear()
        self._is_offloaded = False

    def _copy_of(self, storage: torch.UntypedStorage) -> Tensor:
        """Begin to copy a storage; on a CPU too, where that saves nothing but runs the same way."""
        unused, size = self._unused[storage.nbytes()], storage.nbytes()
        copy = unused.pop() if unused else _host_memory(size, pinned=storage.device.type == "cuda")
        copy.untyped_storage().copy_(storage, non_blocking=True)
        return copy


class Lender:
    """Part of an engine that lends its weights to a copy (``Engine``)."""

    _host_offload: HostOffload

    def lend(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the weights called ``names`` for a copy to use (``Engine.lend``)."""
        lendable = self._lendable()
        lent = {name: lendable[name] for name in names}
        self._host_offload.lend(lent.values())
        return lent

    def take_back(self, tensors: Sequence[Tensor] | None = None) -> None:
        """End the use of ``tensors`` (``Engine.take_back``)."""
        self._host_offload.take_back(tensors)

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter (``Engine.weights``)."""
        raise NotImplementedError

    def _lendable(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter as passes read it."""
        return self.weights()


def _host_memory(size: int, pinned: bool) -> Tensor:
    """Return ``size`` bytes of host memory, uint8; where the driver does not pin them, they are copied more slowly."""
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned:
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
            weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
