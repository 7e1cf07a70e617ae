"""Offload tensors to host memory and back.

The host memory is kept for the next time: to allocate and to pin it takes longer than the copies, and what has not
changed since is not copied again. It is pinned on CUDA in its own size, which torch's pinned memory would round up to a
power of two.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flexrlhf.engines.base import Engine, MemoryUsage
from flexrlhf.engines.copy_streams import CopyStreams


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


@dataclass
class _Copy:
    """Host memory for a storage, whose address no other one has while a reference exists. ``is_new``: it is empty."""

    storage: StorageWeakRef
    memory: Tensor
    is_new: bool = True


class HostOffload:
    """Tensors of one engine in host memory. Storages are moved, so views and shards that share one keep sharing it."""

    def __init__(self, device: torch.device, streams: CopyStreams | None = None) -> None:
        """Copy on ``streams``, which the engines of a rank share; None: on streams of its own."""
        self._device = device
        self._streams = CopyStreams(device) if streams is None else streams
        self._offloaded: list[_OffloadedStorage] = []
        self._is_offloaded, self._keeps = False, True
        self._lent: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, _Copy] = {}  # by the address of the storage
        self._unused: defaultdict[int, list[Tensor]] = defaultdict(list)  # host memory by size
        # when host memory has the copies, and the device the reloaded storages
        self._copied: torch.Event | None = None
        self._arrival: torch.Event | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are offloaded now."""
        return sum(item.num_bytes for item in self._offloaded if item.copy is not None)

    def offload(self, tensors: Iterable[Tensor], keeps: bool = True, changed: bool = True) -> None:
        """Copy the storages of ``tensors`` to host memory and free them; without ``keeps`` free them alone.

        Storages that are lent stay until ``take_back``. May not be called twice without ``reload``.
        ``changed``: whether values may have changed since; if not, copies that exist stay.
        """
        assert not self._is_offloaded, "already offloaded"
        self._is_offloaded, self._keeps = True, keeps
        storages = [each for each in storages_of(tensors) if each._cdata not in self._lent]
        self._keep_copies_of(storages if keeps else [])
        self._offload(storages, changed)

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

    def _offload(self, storages: Iterable[torch.UntypedStorage], changed: bool = True) -> None:
        freed = [each for each in storages if each.device.type == self._device.type]
        if self._arrival is not None:
            self._streams.wait_for(self._arrival)
        copies = [(each, self._copy_of(each)) for each in freed] if self._keeps else []
        pairs = [(storage, copy.memory) for storage, copy in copies if changed or copy.is_new]
        self._copied, self._arrival = self._streams.copy_out(pairs) or self._copied, None
        for _, copy in copies:
            copy.is_new = False
        for storage in freed:
            memory = self._copies[storage._cdata].memory if self._keeps else None
            self._offloaded.append(_OffloadedStorage(storage, storage.nbytes(), memory))
            storage.resize_(0)

    def readable(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or while it is offloaded its copy in host memory."""
        storage = tensor.untyped_storage()
        copies = [item.copy for item in self._offloaded if item.storage._cdata == storage._cdata]
        if not copies or copies[0] is None:
            return tensor
        if self._copied is not None:
            self._copied.synchronize()
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(copies[0].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    def reload(self) -> None:
        """Allocate the storages again and copy back the bytes that were kept."""
        for item in self._offloaded:
            item.storage.resize_(item.num_bytes)
        pairs = [(item.storage, item.copy) for item in self._offloaded if item.copy is not None]
        self._arrival = self._streams.copy_back(pairs, self._copied)
        self._offloaded.clear()
        self._is_offloaded = False

    def _keep_copies_of(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Keep the copies of ``storages`` alone; others have the host memory of the rest."""
        sizes = {each._cdata: each.nbytes() for each in storages}
        for key, copy in list(self._copies.items()):
            if sizes.get(key) != copy.memory.nbytes:
                self._unused[copy.memory.nbytes].append(self._copies.pop(key).memory)

    def _copy_of(self, storage: torch.UntypedStorage) -> _Copy:
        """Return the copy of a storage; on a CPU too, where that saves nothing but runs the same way."""
        if storage._cdata not in self._copies:
            unused, size = self._unused[storage.nbytes()], storage.nbytes()
            memory = unused.pop() if unused else self._streams.host_memory(size)
            self._copies[storage._cdata] = _Copy(StorageWeakRef(storage), memory)
        return self._copies[storage._cdata]


class Lender(Engine):
    """An engine that goes to host memory and lends its weights to a copy; ``Engine`` in engines/base.py documents the
    methods."""

    _host_offload: HostOffload
    _usage_at_offload: MemoryUsage | None = None

    def weights_changed(self) -> None:
        """Do nothing: every pass reads the weights."""

    def memory_usage(self) -> MemoryUsage:
        if self._usage_at_offload is not None:
            return replace(self._usage_at_offload, host=self._host_offload.num_bytes)
        return self._usage()

    def offload(self, keeps: bool = True, changed: bool = True) -> None:
        self._usage_at_offload = self.memory_usage()
        self._host_offload.offload(self._tensors(), keeps, changed)

    def reload(self) -> None:
        self._host_offload.reload()
        self._usage_at_offload = None

    @abstractmethod
    def _usage(self) -> MemoryUsage:
        """Return ``memory_usage`` of an engine on its device."""

    @abstractmethod
    def _tensors(self) -> list[Tensor]:
        """Return what is offloaded: weights and the state of training."""

    def lend(self, names: Sequence[str]) -> dict[str, Tensor]:
        lendable = self._lendable()
        lent = {name: lendable[name] for name in names}
        self._host_offload.lend(lent.values())
        return lent

    def take_back(self, tensors: Sequence[Tensor] | None = None) -> None:
        self._host_offload.take_back(tensors)

    def _lendable(self) -> dict[str, Tensor]:
        """Return this rank's part of every parameter as passes read it."""
        return self.weights()
