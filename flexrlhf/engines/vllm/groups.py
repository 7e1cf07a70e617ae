"""Process groups of one vLLM engine, created on a store of its own, apart from those of the run."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupMember, GroupName, _new_process_group_helper, _world

from flexrlhf.engines.base import EngineContext


class PrivateGroups:
    """Ranks of a replica as a world of ``size`` ranks, of which this is number ``rank``: stage after stage.

    vLLM creates some sixteen groups, each of which would have threads and sockets: here those of the same ranks and
    backend are one.
    """

    def __init__(self, context: EngineContext) -> None:
        assert context.stages is not None, "every engine of a run has its replica"
        replica, device = context.stages.replica, context.device
        self.rank = 0 if replica.group is None else replica.group.rank()
        self.size = len(replica.ranks)
        # differs from earlier engines on this store; the ranks of the replica agree on it
        number = replica.largest(secrets.randbits(48), device)
        self._name, self._store = f"vllm-{number:012x}", context.store
        self._timeout = timedelta(seconds=context.timeout_seconds)
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        # that of the run: gloo where ranks share a GPU
        self._backend = "gloo" if replica.group is None else dist.get_backend(replica.group)
        self.world = self._group(tuple(range(self.size)), self._backend)

    def new_group(self, ranks: Sequence[int], *_: Any, backend: str | None = None, **__: Any) -> Any:
        """Replace ``torch.distributed.new_group``: make a group of ranks of this world, or of this rank alone."""
        if self.rank not in ranks:
            return GroupMember.NON_GROUP_MEMBER
        return self._group(tuple(ranks), self._backend if backend is None else str(backend))

    def close(self) -> None:
        """Destroy all groups."""
        for group in self._made.values():
            # destroy_process_group at the end of a run destroys all groups
            if group in _world.pg_map:
                dist.destroy_process_group(group)
        self._made.clear()
        del self.world

    def _group(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        # a single rank does not communicate
        key = (ranks, backend if len(ranks) > 1 else "gloo")
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        name = GroupName(f"{self._name}-{backend}-{'.'.join(map(str, ranks))}")
        group, _ = _new_process_group_helper(
            len(ranks),
            ranks.index(self.rank),
            [],
            backend,
            self._store,
            name,
            timeout=self._timeout,
            group_desc="vllm",
        )
        _world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
        return group
