"""World of a job: rank, store, device, the process groups of a plan, and waits with a deadline.

WORLD itself is sealed: its back end refuses every collective, because an instruction may communicate only among the
ranks that it names, in a group of its own purpose (CONTRIBUTING: the three rules).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flexrlhf.errors import RunStopped
from flexrlhf.placement.groups import Group


class SealedWorld(dist.ProcessGroup):
    """Back end for WORLD that refuses every collective."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "sealed"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("collective on WORLD: after start-up use the group that the plan made for this purpose")

    allreduce = broadcast = allgather = alltoall_base = barrier = reduce = gather = scatter = _refuse
    reduce_scatter = _allgather_base = _reduce_scatter_base = send = recv = alltoall = recv_anysource = _refuse
    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = allreduce_coalesced = allgather_coalesced = (
        _refuse
    )


def _make_sealed(_: dist.Store, rank: int, size: int, __: timedelta) -> SealedWorld:
    return SealedWorld(rank, size)


class Wait(Protocol):
    """Function that waits for communication and, when the deadline passes, names the ``ranks`` that are missing."""

    def __call__(self, work: dist.Work, ranks: tuple[int, ...]) -> None: ...


def posted(work: dist.Work | None) -> dist.Work:
    """Return ``work``. torch returns None on ranks outside a group; no plan has those call."""
    assert work is not None, "this rank is outside the group"
    return work


@dataclass(frozen=True)
class World:
    """One rank of the job.

    rank, size:  of all ranks.
    store:       key-value store of the job, which is no collective.
    device:      of this rank.
    backend:     of process groups: gloo on CPU, nccl on GPUs.
    """

    rank: int
    size: int
    store: dist.Store
    device: torch.device
    backend: str

    def make_groups(self, groups: Iterable[Group], timeout_seconds: float) -> Groups:
        """Create all groups in plan order; NCCL groups are warmed up. Every rank calls this with the same list."""
        made: dict[Group, dist.ProcessGroup | None] = {}
        for group in groups:
            with deadline(
                f"rank {self.rank} at start-up, group {group.purpose}", lambda: "a rank that has not started"
            ):
                handle = dist.new_group(
                    list(group.ranks),
                    backend=self.backend,
                    timeout=timedelta(seconds=timeout_seconds),
                    group_desc=group.purpose,
                )
            mine = self.rank in group.ranks
            if mine and self.backend == "nccl":
                dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
            made[group] = handle if mine else None
        return Groups(made)

    def meet(self, what: str, timeout_seconds: float) -> None:
        """Wait, through the store, until every rank has called this. Raises DeadlineError with the missing ranks."""
        self.store.set(f"meet/{what}/{self.rank}", "here")
        keys = {f"meet/{what}/{rank}": f"rank {rank}" for rank in range(self.size)}
        self.wait_for(self.store, keys, what, timeout_seconds)

    def wait_for(self, store: dist.Store, keys: Mapping[str, str], what: str, timeout_seconds: float) -> None:
        """Wait for keys of the store. ``keys``: key → who writes it, for the sentence when the deadline passes."""
        with deadline(
            f"rank {self.rank} at {what}",
            lambda: ", ".join(dict.fromkeys(who for key, who in keys.items() if not store.check([key]))),
        ):
            store.wait(list(keys), timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class Groups:
    """Process groups by purpose and ranks. A single rank has none: it has nothing to communicate."""

    handles: dict[Group, dist.ProcessGroup | None]

    def get(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` for ``purpose``; None for a single rank."""
        return None if len(ranks) == 1 else self.handles[Group(purpose, ranks)]

    def alone(self, rank: int) -> dist.ProcessGroup | None:
        """Return the group of this rank by itself, where a library of one of its engines requires one."""
        return self.handles.get(Group("alone", (rank,), alone=True))

    def close(self) -> None:
        """Drop the groups. Their threads and sockets end with the last reference, so no other one may be left."""
        for handle in self.handles.values():
            if handle is not None:
                dist.destroy_process_group(handle)
        self.handles.clear()


@contextmanager
def open_world(device: str, timeout_seconds: float) -> Iterator[World]:
    """Join the job that the environment describes. ``device``: cpu or cuda, the same on all ranks."""
    cuda = device == "cuda"
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    store = dist.PrefixStore("flexrlhf", store)
    dist.Backend.register_backend("sealed", _make_sealed, devices=["cpu", "cuda"])
    dist.init_process_group("sealed", store=store, rank=rank, world_size=size)
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    try:
        yield World(rank, size, store, place, "nccl" if cuda else "gloo")
    finally:
        dist.destroy_process_group()


class RankProgress:
    """Position of each rank in the list that all ranks walk, in the job's store, and the waits of this rank."""

    def __init__(self, world: World, run: str) -> None:
        self._world = world
        self._run = run
        self._position = 0
        self._what = ""

    def report(self, position: int, what: str) -> None:
        """Store that this rank has come to ``position``, which grows along the list; ``what`` it does there."""
        self._position, self._what = position, what
        self._world.store.set(self._key(self._world.rank), json.dumps([position, what]))

    def wait(self, work: dist.Work, ranks: tuple[int, ...]) -> None:
        """Wait for ``work`` with ``ranks``. Raises DeadlineError."""
        with self.deadline(ranks):
            work.wait()

    def deadline(self, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        """Return a context that names a failed wait for ``ranks`` by what this rank does."""
        return deadline(f"rank {self._world.rank} at {self._what}", lambda: self.missing(ranks))

    def missing(self, ranks: Iterable[int]) -> str:
        """Return which of ``ranks`` are behind this one, with what each reported last; if none is, which are level with
        it, since one of those does not go on."""
        seen = {rank: self._seen(rank) for rank in ranks if rank != self._world.rank}
        behind = [f"rank {rank} (at: {what})" for rank, (at, what) in seen.items() if at < self._position]
        inside = [f"rank {rank} (at: {what}, too)" for rank, (at, what) in seen.items() if at == self._position]
        return ", ".join(behind or inside) or "nobody: all ranks have gone on, one failed inside"

    def _key(self, rank: int) -> str:
        return f"{self._run}/at/{rank}"

    def _seen(self, rank: int) -> tuple[int, str]:
        """Return the position and words that ``rank`` last reported."""
        if not self._world.store.check([self._key(rank)]):
            return -1, "not started"
        at, what = json.loads(self._world.store.get(self._key(rank)))
        return int(at), str(what)


class DeadlineError(RunStopped):
    """Failure of a wait because ranks were missing."""


@contextmanager
def deadline(what: str, who_is_missing: Callable[[], str]) -> Iterator[None]:
    """Raise DeadlineError for a failed wait: ``what`` was waited for, and which ranks have not arrived."""
    try:
        yield
    except RuntimeError as error:
        reason = _reason(str(error).lower())
        if reason is None:
            raise
        raise DeadlineError(f"{what}: {reason}, waiting for {who_is_missing()}") from error


def _reason(text: str) -> str | None:
    """Return what torch's message means when a wait failed; None for any other error."""
    if any(sign in text for sign in ("timed out", "timeout")):
        return "the deadline passed"
    if any(sign in text for sign in ("connection closed", "connection reset", "broken pipe")):
        return "the connection closed"
    return None
