"""Offload and reload of one vLLM engine: weights go to host memory or are discarded, the KV cache is discarded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexrlhf.api.engine import EngineContext, HostOffload, storage_bytes


class SleepMode:
    """Sleep mode of one vLLM engine: vLLM's own on GPUs; on CPUs, where vLLM has none, freed storages.

    num_unmapped_bytes:  bytes that torch counts as allocated, though vLLM has returned them to the device.
    has_cache:           whether the KV cache is on the device.
    """

    def __init__(self, engine: Any, context: EngineContext) -> None:
        self._engine, device = engine, context.device
        self._on_cpu, self._discards = device.type == "cpu", context.switches.sleep_level_2
        self._weights, self._cache = HostOffload(device, context.copies), HostOffload(device, context.copies)
        self._copied_bytes = self.num_unmapped_bytes = 0
        self.has_cache = True

    @property
    def num_host_bytes(self) -> int:
        """Bytes of weights that are in host memory now."""
        return self._weights.num_bytes + self._copied_bytes

    def sleep(self, keeps: bool) -> None:
        """Free the weights and the KV cache. ``keeps``: whether the weights have to be copied to host memory."""
        keeps = keeps or not self._discards
        parameters, caches = self._tensors("parameters"), self._tensors("caches")
        if self._on_cpu:
            self._weights.offload(parameters, keeps)
            if self.has_cache:
                self._cache.offload(caches, keeps=False)
        else:
            self._copied_bytes = storage_bytes(parameters) if keeps else 0
            self.num_unmapped_bytes = storage_bytes([*parameters, *caches])
            # 2: weights are discarded too, and buffers are copied
            self._engine.sleep(level=1 if keeps else 2)
        self.has_cache = False

    def wake_weights(self) -> None:
        """Allocate the weights again, with their values where they were kept."""
        if self._on_cpu:
            self._weights.reload()
            return
        self._engine.wake_up(["weights"])
        self._copied_bytes, self.num_unmapped_bytes = 0, storage_bytes(self._tensors("caches"))

    def wake_cache(self) -> None:
        """Allocate the KV cache again, empty. Weights can be written before, without its memory."""
        if self.has_cache:
            return
        self.has_cache = True
        if not self._on_cpu:
            self._engine.wake_up(["kv_cache"])
            self.num_unmapped_bytes = 0
            return
        self._cache.reload()
        for cache in self._tensors("caches"):
            # unwritten places of a block are read, and masked, which only finite values survive
            cache.zero_()

    def _tensors(self, method: str) -> list[Tensor]:
        (tensors,) = self._engine.collective_rpc(method)
        return list(tensors)
