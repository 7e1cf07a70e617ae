"""Process groups of one vLLM engine, created on a store of its own, apart from those of the run."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _new_process_group_helper, _world

from flexrlhf.engines.base import EngineContext


class PrivateGroups:
    """Tensor-parallel group as a world of ``size`` ranks, of which this is number ``rank``.

    vLLM creates some sixteen groups, each of which would have threads and sockets: here those of the same ranks and
    backend are one.
    """

    def __init__(self, context: EngineContext) -> None:
        tp, device = context.tp, context.device
        self.rank = 0 if tp.group is None else tp.group.rank()
        self.size = len(tp.ranks)
        # differs from earlier engines on this store; the ranks of the group agree on it
        number = tp.largest(secrets.randbits(48), device)
        self._name, self._store = f"vllm-{number:012x}", context.store
        self._timeout = timedelta(seconds=context.timeout_seconds)
        self._made: dict[tuple[int, str], dist.ProcessGroup] = {}
        # that of the run: gloo where ranks share a GPU
        self._backend = "gloo" if tp.group is None else dist.get_backend(tp.group)
        self.world = self._group(self.size, self._backend)

    def new_group(self, ranks: Sequence[int], *_: Any, backend: str | None = None, **__: Any) -> dist.ProcessGroup:
        """Replace ``torch.distributed.new_group``, for groups of this rank alone or of all ranks."""
        assert len(ranks) in (1, self.size), f"vLLM creates a group of ranks {ranks} of {self.size}"
        return self._group(len(ranks), self._backend if backend is None else str(backend))

    def close(self) -> None:
        """Destroy all groups."""
        for group in self._made.values():
            # destroy_process_group at the end of a run destroys all groups
            if group in _world.pg_map:
                dist.destroy_process_group(group)
        self._made.clear()
        del self.world

    def _group(self, size: int, backend: str) -> dist.ProcessGroup:
        # a single rank does not communicate
        key = (size, backend if size > 1 else "gloo")
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, size: int, backend: str) -> dist.ProcessGroup:
        rank = self.rank if size > 1 else 0
        name = GroupName(f"{self._name}-{backend}-{self.rank if size == 1 else 'all'}")
        group, _ = _new_process_group_helper(
            size, rank, [], backend, self._store, name, timeout=self._timeout, group_desc="vllm"
        )
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        return group
