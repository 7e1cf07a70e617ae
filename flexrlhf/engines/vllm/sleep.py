"""Offload and reload of one vLLM engine: weights go to host memory, the KV cache is discarded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexrlhf.engines.host_offload import HostOffload, storage_bytes


class SleepMode:
    """Sleep mode of one vLLM engine: vLLM's own on GPUs; on CPUs, where vLLM has none, freed storages."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine = engine
        self._on_cpu = device.type == "cpu"
        self._host_offload = HostOffload(device)
        self._caches: list[tuple[torch.UntypedStorage, int]] = []
        self._asleep_bytes = 0

    @property
    def num_host_bytes(self) -> int:
        """Bytes of weights that are offloaded now."""
        return self._host_offload.num_bytes + self._asleep_bytes

    def sleep(self) -> None:
        """Offload the weights and free the KV cache."""
        parameters = self._tensors("parameters")
        if not self._on_cpu:
            self._asleep_bytes = storage_bytes(parameters)
            self._engine.sleep(level=1)
            return
        self._host_offload.offload(parameters)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors("caches")}
        self._caches = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._caches:
            storage.resize_(0)

    def wake_up(self) -> None:
        """Reload the weights and allocate an empty KV cache."""
        if not self._on_cpu:
            self._engine.wake_up()
            self._asleep_bytes = 0
            return
        self._host_offload.reload()
        for storage, size in self._caches:
            storage.resize_(size)
            # unwritten places of a block are read, and masked, which only finite numbers survive
            storage.fill_(0)  # type: ignore[attr-defined]
        self._caches.clear()

    def _tensors(self, method: str) -> list[Tensor]:
        """Call a method of WorkerExtension that returns tensors."""
        (tensors,) = self._engine.collective_rpc(method)
        return list(tensors)
