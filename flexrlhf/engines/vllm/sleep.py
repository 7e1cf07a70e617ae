"""Put an engine's memory away and take it back: its weights wait in host memory, its cache is lost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexrlhf.engines.host_offload import HostOffload, storage_bytes


class SleepMode:
    """The memory of one vLLM engine. On GPUs it is vLLM's to unmap; on a CPU, where vLLM cannot sleep, ours to free."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine = engine
        self._on_cpu = device.type == "cpu"
        self._host_offload = HostOffload(device)
        self._caches: list[tuple[torch.UntypedStorage, int]] = []
        self._asleep_bytes = 0

    @property
    def num_host_bytes(self) -> int:
        """Weights that wait in host memory."""
        return self._host_offload.num_bytes + self._asleep_bytes

    def sleep(self) -> None:
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
        if not self._on_cpu:
            self._engine.wake_up()
            self._asleep_bytes = 0
            return
        self._host_offload.reload()
        for storage, size in self._caches:
            storage.resize_(size)
            # a block's unwritten places are read, and count for nothing only if they are numbers
            storage.fill_(0)  # type: ignore[attr-defined]
        self._caches.clear()

    def _tensors(self, which: str) -> list[Tensor]:
        (tensors,) = self._engine.collective_rpc(which)
        return list(tensors)
