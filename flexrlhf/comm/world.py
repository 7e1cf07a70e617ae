"""The job's world: rank, store, device, and the process groups of a plan.

WORLD itself is sealed: its back end refuses every collective, because an instruction may communicate only among the
ranks that it names, in a group of its own purpose (CONTRIBUTING: the three rules).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flexrlhf.errors import RunStopped
from flexrlhf.placement.groups import Group


class SealedWorld(dist.ProcessGroup):
    """A back end for WORLD without any collective."""

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
    """How a rank waits for communication: with a deadline, and naming those of ``ranks`` that have not come."""

    def __call__(self, work: dist.Work, ranks: tuple[int, ...]) -> None: ...


def posted(work: dist.Work | None) -> dist.Work:
    """torch returns None to ranks outside a group; the plan never lets those call."""
    assert work is not None, "this rank is outside the group"
    return work


@dataclass(frozen=True)
class World:
    """``backend`` carries data: gloo on CPU, nccl on GPUs. ``store``: key-value store of the job, not a collective."""

    rank: int
    size: int
    store: dist.Store
    device: torch.device
    backend: str

    def make_groups(self, groups: Iterable[Group], timeout_seconds: float) -> Groups:
        """Create all groups in plan order. Every rank calls this with the same list; NCCL groups are warmed up."""
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
        """Wait until every rank has come here, through the store; on a deadline name those that have not."""
        self.store.set(f"meet/{what}/{self.rank}", "here")
        keys = {f"meet/{what}/{rank}": f"rank {rank}" for rank in range(self.size)}
        self.wait_for(self.store, keys, what, timeout_seconds)

    def wait_for(self, store: dist.Store, keys: Mapping[str, str], what: str, timeout_seconds: float) -> None:
        """Wait for keys of the store; ``keys`` say who writes each, for the sentence when the deadline passes."""
        with deadline(
            f"rank {self.rank} at {what}",
            lambda: ", ".join(dict.fromkeys(who for key, who in keys.items() if not store.check([key]))),
        ):
            store.wait(list(keys), timedelta(seconds=timeout_seconds))


@dataclass(frozen=True)
class Groups:
    """Process groups by purpose and ranks. A single rank has none and gets None: nothing to communicate."""

    handles: dict[Group, dist.ProcessGroup | None]

    def get(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return None if len(ranks) == 1 else self.handles[Group(purpose, ranks)]

    def alone(self, rank: int) -> dist.ProcessGroup | None:
        """The group of this rank by itself, where a library of one of its engines wants one."""
        return self.handles.get(Group("alone", (rank,), alone=True))

    def close(self) -> None:
        """Drop the groups. Their threads and sockets end with the last reference, so nobody else may keep one."""
        for handle in self.handles.values():
            if handle is not None:
                dist.destroy_process_group(handle)
        self.handles.clear()


@contextmanager
def open_world(device: str, timeout_seconds: float) -> Iterator[World]:
    """Join the job that the launcher described in the environment. ``device``: cpu or cuda, the same on all ranks."""
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
    """Where every rank is, in the job's store, so that whoever waits too long can name whom it waits for."""

    def __init__(self, world: World, run: str) -> None:
        self._world = world
        self._run = run

    def _key(self, rank: int) -> str:
        return f"{self._run}/at/{rank}"

    def report(self, position: int, what: str) -> None:
        """``position`` grows along the list that all ranks walk."""
        self._world.store.set(self._key(self._world.rank), json.dumps([position, what]))

    def missing(self, ranks: Iterable[int], position: int) -> str:
        """The ranks that have not come to ``position``, and what each was last seen doing; if all have, those that are
        there too, of which one does not go on."""
        seen = {rank: self._seen(rank) for rank in ranks if rank != self._world.rank}
        behind = [f"rank {rank} (at: {what})" for rank, (at, what) in seen.items() if at < position]
        inside = [f"rank {rank} (at: {what}, too)" for rank, (at, what) in seen.items() if at == position]
        return ", ".join(behind or inside) or "nobody: all ranks have gone on, one failed inside"

    def _seen(self, rank: int) -> tuple[int, str]:
        """Position and words of what ``rank`` last reported."""
        if not self._world.store.check([self._key(rank)]):
            return -1, "not started"
        at, what = json.loads(self._world.store.get(self._key(rank)))
        return int(at), str(what)


class DeadlineError(RunStopped):
    """A wait that ended without its ranks."""


@contextmanager
def deadline(what: str, who_is_missing: Callable[[], str]) -> Iterator[None]:
    """Give a failed wait its name: what was waited for, and who has not arrived."""
    try:
        yield
    except RuntimeError as error:
        reason = _reason(str(error).lower())
        if reason is None:
            raise
        raise DeadlineError(f"{what}: {reason}, waiting for {who_is_missing()}") from error


def _reason(text: str) -> str | None:
    """What torch's message means when a wait failed; None for any other error."""
    if any(sign in text for sign in ("timed out", "timeout")):
        return "the deadline passed"
    if any(sign in text for sign in ("connection closed", "connection reset", "broken pipe")):
        return "the connection closed"
    return None
