"""World of a job: rank, store, device, and the process groups of a plan.

WORLD itself is sealed: its back end refuses every collective, because an instruction may communicate only among the
ranks that it names, in a group of its own purpose (CONTRIBUTING: the three rules).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.distributed_c10d import GroupMember, GroupName, _new_process_group_helper, _world

from flexrlhf.comm.deadlines import STORE_CLOSED, Cause, DeadlineError, Waits, await_device, deadline
from flexrlhf.comm.store import (
    INTERFACES,
    Endpoint,
    Notice,
    await_keys,
    own_address,
    route_to,
    use_job_interface,
)
from flexrlhf.config.output_settings import NO_SWITCHES, Switches
from flexrlhf.config.proxies import call_directly
from flexrlhf.errors import UserError, some_of
from flexrlhf.placement.groups import Group
from flexrlhf.placement.hosts import Hosts
from flexrlhf.text import ranks_text

ABORT_SECONDS = 60.0
"""Time after a deadline in which a rank ends by itself before NCCL's watchdog aborts it without a sentence."""
GOES_ON_SECONDS = 30 * 86_400.0
"""The same of messages that go on while their ranks compute. The watchdog counts from the beginning of a message, our
deadline from the beginning of the wait for it: between them a rank may compute for as long as a batch takes."""
MOVE_BLOCKS = 4
"""Most thread blocks of a GPU that messages of rows run on, here and at their other end. A message that has not come is
a kernel that spins, perhaps for a whole training, on a multiprocessor for each; rows are few megabytes."""
LEAVE_SECONDS = 30.0
"""Longest wait of the rank that serves the store for ranks that end after it."""
ALONE = "alone"
"""Back end of groups of one rank, whose collectives copy their input, if it is not their output. A communicator of NCCL
would take 0.4 GB of a GPU with the first collective, which DeepSpeed and Megatron call for every norm."""
SINGLY = ", messages one by one"
"""End of the description of a group whose messages between pairs of ranks are not begun together."""

INTERFACE_ADVICE = {
    "gloo": "set GLOO_SOCKET_IFNAME to the network interface of the job on every machine",
    "nccl": "set NCCL_SOCKET_IFNAME to the network interface of the job on every machine, and NCCL_DEBUG=INFO to see "
    "what NCCL tries",
}
"""Advice for ranks that do not reach each other, by back end."""


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


class Waitable(Protocol):
    """Communication under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class InOrder:
    """Communication of which the device needs the result only for what it is given later.

    With NCCL its wait returns at once, and nobody polls it. If it hangs, so does all that the device is given later,
    and the next wait of the host finds it: ``Queued`` at the latest. With gloo the host waits, as for any other.
    """

    work: Waitable

    def wait(self) -> None:
        """Have the device's current stream wait."""
        self.work.wait()


class Queued(dist.Work):
    """All work that a device has been given until now, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._event: Any = torch.Event(device)
        self._event.record()

    def is_completed(self) -> bool:
        """Return whether the device has done the work."""
        return bool(self._event.query())

    def wait(self, *_: Any) -> bool:
        """Wait until the device has done the work."""
        self._event.synchronize()
        return True


class Wait(Protocol):
    """Function that waits for communication and, when the deadline passes, names the ``ranks`` that are missing."""

    def __call__(self, work: Waitable, ranks: tuple[int, ...]) -> None: ...


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
    backend:     of process groups: nccl if every rank has a GPU of its own, else gloo.
    host:        name of this machine.
    local_rank:  number of this rank among those of this machine.
    switches:    mechanisms that the run does without.
    waits:       the wait of this rank's main thread.
    """

    rank: int
    size: int
    store: dist.Store
    device: torch.device
    backend: str
    host: str = ""
    local_rank: int = 0
    switches: Switches = NO_SWITCHES
    waits: Waits = field(default_factory=Waits)
    _numbers: Iterator[int] = field(default_factory=count)

    def under(self, switches: Switches) -> World:
        """Return this world for a run with ``switches``."""
        backend = "gloo" if switches.backend == "gloo" else self.backend
        return replace(self, backend=backend, switches=switches)

    @property
    def polls(self) -> bool:
        """Whether the host looks at its device until that has done what it waits for."""
        return self.backend == "nccl" and self.switches.device_polling

    @property
    def on_gpu(self) -> World:
        """The rank on its GPU, with NCCL."""
        return replace(self, device=local_device("cuda"), backend="nccl")

    @property
    def gpu_number(self) -> str:
        """The own number of this rank's GPU: if each process sees one alone, all of them are cuda:0."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @staticmethod
    def backend_of(gpus: Sequence[str]) -> str:
        """Return the back end of all ranks, given the number of each rank's GPU: NCCL refuses two ranks on one, for
        which gloo serves."""
        return "gloo" if len(set(gpus)) < len(gpus) else "nccl"

    @property
    def first_here(self) -> int:
        """First rank of this machine."""
        return self.rank - self.local_rank

    def make_groups(self, groups: Iterable[Group], timeout_seconds: float) -> Groups:
        """Create all groups in plan order; NCCL's are warmed up. Every rank calls this with the same list."""
        made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}
        handles: dict[Group, dist.ProcessGroup | None] = {}
        for group in groups:
            if group.communicator not in made:
                made[group.communicator] = self._connect(group, timeout_seconds)
            handles[group] = made[group.communicator]
        return Groups(handles)

    def add_group(self, groups: Groups, group: Group, timeout_seconds: float) -> None:
        """Add ``group`` to ``groups`` if it is not there. Every rank calls this in the same order."""
        if group not in groups.handles and len(group.ranks) > 1:
            groups.handles[group] = self._connect(group, timeout_seconds)

    def close_groups(self, groups: Groups, timeout_seconds: float) -> None:
        """Drop ``groups``. Their threads and sockets end with the last reference, so no other one may be left.

        With NCCL each is destroyed by all its ranks together.
        """
        with self.waits.on(range(self.size), timeout_seconds):
            for handle in dict.fromkeys(groups.handles.values()):
                if handle is not None:
                    dist.destroy_process_group(handle)
        groups.handles.clear()

    def _connect(self, group: Group, timeout_seconds: float) -> dist.ProcessGroup | None:
        """Create a group on its own ranks, with a number that all ranks count; return None elsewhere."""
        number = next(self._numbers)
        if self.rank not in group.ranks:
            return None
        with self.waits.on(group.ranks, timeout_seconds), self._connecting(group):
            handle = new_group(
                group.ranks,
                self.rank,
                ALONE if group.alone else self.backend,
                self.store,
                f"flexrlhf-{number}",
                timeout_seconds + self._abort_seconds(group),
                group.communicator[0] + SINGLY * (not self.switches.message_batches),
                most_blocks=self._most_blocks(group),
            )
            # the first batch of messages needs all ranks of its communicator
            if self.backend == "nccl" and len(group.ranks) > 1:
                first = dist.all_reduce(torch.zeros(1, device=self.device), group=handle, async_op=True)
                if self.switches.device_polling:
                    await_device(posted(first), timeout_seconds)
        return handle

    def _most_blocks(self, group: Group) -> int | None:
        is_limited = self.backend == "nccl" and group.purpose == "move" and self.switches.move_blocks
        return MOVE_BLOCKS if is_limited else None

    def _abort_seconds(self, group: Group) -> float:
        """Return the time after a deadline in which the back end of ``group`` leaves a wait to us."""
        if self.backend != "nccl":
            return 0.0
        return GOES_ON_SECONDS if group.goes_on else ABORT_SECONDS

    def meet(self, what: str, timeout_seconds: float) -> None:
        """Wait, through the store, until every rank has called this. Raises DeadlineError with the missing ranks."""
        self.store.set(f"meet/{what}/{self.rank}", "here")
        keys = {f"meet/{what}/{rank}": f"rank {rank}" for rank in range(self.size)}
        self.wait_for(self.store, keys, what, timeout_seconds)

    def wait_for(self, store: dist.Store, keys: Mapping[str, str], what: str, timeout_seconds: float) -> None:
        """Wait for keys of the store. ``keys``: key → who writes it, for the sentence when the deadline passes."""

        def explain(cause: Cause) -> str:
            if cause == "closed":
                return STORE_CLOSED
            missing = [who for key, who in keys.items() if not store.check([key])]
            arrived = [who for who in dict.fromkeys(keys.values()) if who not in missing]
            return (
                f"the deadline of {timeout_seconds:g} s passed, waiting for {some_of(list(dict.fromkeys(missing)))}; "
                f"arrived: {some_of(arrived) or 'none of them'}"
            )

        with deadline(f"{self} at {what}", explain):
            store.wait(list(keys), timedelta(seconds=timeout_seconds))

    @property
    def address(self) -> str:
        """Address where gloo listens on this machine."""
        return own_address(self.host)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host})" if self.host else f"rank {self.rank}"

    @contextmanager
    def _connecting(self, group: Group) -> Iterator[None]:
        """Raise DeadlineError if the ranks of a group do not connect to each other."""
        try:
            yield
        except RuntimeError as error:
            # without the place in torch's sources
            reason = re.sub(r"\[/[^]]*] ", "", str(error).strip().splitlines()[0]).partition(". This is")[0]
            ranks = some_of([str(rank) for rank in group.ranks])
            raise DeadlineError(
                f"{self} at start-up: ranks {ranks} of the group {group.purpose} do not reach each other ({reason}); "
                f"if none has ended, {INTERFACE_ADVICE[self.backend]}"
            ) from error


def new_group(
    ranks: Sequence[int],
    rank: int,
    backend: str,
    store: dist.Store,
    name: str,
    timeout_seconds: float,
    description: str,
    in_world: bool = True,
    most_blocks: int | None = None,
) -> dist.ProcessGroup:
    """Create a process group, which its own ranks alone call: for torch's, all ranks of the world meet each time.

    rank:         of this process, among ``ranks``.
    name:         alike on the ranks of the group, of no other group that the store has had.
    in_world:     whether ``ranks`` are those of the job's world.
    most_blocks:  of a GPU that NCCL's kernels may have; None: NCCL decides.
    """
    ordered, timeout, options = sorted(ranks), timedelta(seconds=timeout_seconds), None
    if most_blocks is not None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.config.max_ctas = timeout, most_blocks
    group, _ = _new_process_group_helper(
        len(ordered),
        ordered.index(rank),
        ordered if in_world else [],
        backend,
        store,
        GroupName(name),
        backend_options=options,
        timeout=timeout,
        group_desc=description,
    )
    _world.pg_group_ranks[group] = {each: index for index, each in enumerate(ordered)}
    return group


@dataclass(frozen=True)
class Groups:
    """Process groups by purpose and ranks, of which some share one. A single rank has none, and nothing to send."""

    handles: dict[Group, dist.ProcessGroup | None]

    def get(self, purpose: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of ``ranks`` for ``purpose``; None for a single rank."""
        return None if len(ranks) == 1 else self.handles[Group(purpose, ranks)]

    def alone(self, rank: int) -> dist.ProcessGroup | None:
        """Return the group of this rank by itself, if a library of one of its engines requires one."""
        return self.handles.get(Group("alone", (rank,), alone=True))


MANY_QUEUES = 32
"""Hardware queues of a GPU: messages that wait for other ranks keep one each, and torch's streams share eight."""


@contextmanager
def open_world(device: str, timeout_seconds: float, one_queue: Callable[[int], bool] | None = None) -> Iterator[World]:
    """Join the job that the environment describes.

    device:     cpu or cuda, the same on all ranks.
    one_queue:  whether work of a rank's GPU needs one hardware queue; the environment may set the number.

    A rank that fails does not destroy its groups: with NCCL it would wait for their messages and for the other ranks,
    and its error would be read by nobody. They end with the process.
    """
    rank, size, host = _number("RANK"), _number("WORLD_SIZE"), socket.gethostname()
    store = _join(rank, size, host, timeout_seconds)
    dist.Backend.register_backend("sealed", lambda _, *place: SealedWorld(*place[:2]), devices=["cpu", "cuda"])
    # torch's group for dry runs, which is right for one rank
    dist.Backend.register_backend(
        ALONE, lambda _, *place: FakeProcessGroup._create_internal(*place[:2]), devices=["cpu", "cuda"]
    )
    dist.init_process_group("sealed", store=store, rank=rank, world_size=size)
    world = World(rank, size, store, local_device(device), "gloo", host, local_rank())
    if device == "cuda":
        queues = 1 if one_queue is not None and one_queue(rank) else MANY_QUEUES
        # read when the device is first used
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
        torch.cuda.set_device(world.device)
        # it builds a plan for each new shape, and packed rows and decoding have a new one nearly every time
        torch.backends.cuda.enable_cudnn_sdp(False)
        world = replace(world, backend=World.backend_of(_gpus_of_all(world, timeout_seconds)))
    yield world
    _leave(store, rank, size)
    dist.destroy_process_group()


def _leave(store: dist.Store, rank: int, size: int) -> None:
    """Keep a store that rank 0's process serves until the other ranks need it no more: one may still be waiting."""
    if rank > 0:
        store.set(f"left/{rank}", "")
    elif _serves_store(rank):
        with suppress(dist.DistError):
            store.wait([f"left/{each}" for each in range(1, size)], timedelta(seconds=LEAVE_SECONDS))


def _serves_store(rank: int) -> bool:
    """Return whether this process serves the job's store, rather than a launcher."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def local_device(kind: str) -> torch.device:
    """Return the CPU, or the accelerator of this rank: its own, or one that several ranks of this machine share."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank() % torch.accelerator.device_count())


def local_rank() -> int:
    """Return the number of this process among the ranks of its machine, by the launcher's variable."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _gpus_of_all(world: World, timeout_seconds: float) -> list[str]:
    """Return the number of each rank's GPU."""
    world.store.set(f"GPU/{world.rank}", world.gpu_number)
    keys = [f"GPU/{each}" for each in range(world.size)]
    world.store.wait(keys, timedelta(seconds=timeout_seconds))
    return [world.store.get(key).decode() for key in keys]


def _join(rank: int, size: int, host: str, timeout_seconds: float) -> dist.Store:
    """Return the job's store, once every rank has joined it; says every few seconds who is awaited."""
    # one rank of each machine prints
    prints = local_rank() == 0
    endpoint = Endpoint("MASTER_ADDR and MASTER_PORT", os.environ["MASTER_ADDR"].strip("[]"), _number("MASTER_PORT"))
    is_server = _serves_store(rank)
    store = (
        endpoint.serve(True, timeout_seconds)
        if is_server
        else endpoint.connect(timeout_seconds, Notice(f"rank {rank} waits for the job's store", prints))
    )
    # a store may serve several attempts
    attempt = dist.PrefixStore(f"flexrlhf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    attempt.set(f"joined/{rank}", f"{route_to(endpoint.address) or ''}/{host}")
    keys = {f"joined/{each}": f"rank {each}" for each in range(size)}
    notice = Notice(f"rank {rank} waits for the job's {size} ranks", prints)
    await_keys(attempt, keys, timeout_seconds, notice)
    found = [each.decode().split("/", 1) for each in attempt.multi_get(list(keys))]
    use_job_interface([address for address, _ in found if address], endpoint.address)
    call_directly(dict.fromkeys(name for place in found for name in place))
    if rank == 0 and len(hosts := ranks_by_host(found)) > 1:
        interface = os.environ.get(INTERFACES[0], "an interface that gloo chooses")
        print(f"hosts: {'; '.join(hosts)}; here over {interface}", flush=True)
    return attempt


def ranks_by_host(places: Sequence[Sequence[str]]) -> list[str]:
    """Return a text for each host, with its address and ranks. ``places``: address and host of each rank."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(tuple(place), []).append(rank)
    return [f"{host} ({address}) {ranks_text(tuple(own))}" for (address, host), own in ranks.items()]


def _number(name: str) -> int:
    """Return a variable of the launcher as a number. Raises UserError unless it is one."""
    value = os.environ.get(name)
    if value is None or not value.isdecimal():
        raise UserError(f"{name}: {'missing from' if value is None else repr(value) + ' in'} the environment of a rank")
    if name == "MASTER_PORT" and not 1 <= int(value) <= Hosts.MOST_PORT:
        raise UserError(f"{name}: no port {value}, use 1 to {Hosts.MOST_PORT}")
    return int(value)


@contextmanager
def as_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Make ``group`` the default one; ranks are then numbers inside it."""
    world = GroupMember.WORLD
    GroupMember.WORLD = group
    try:
        yield
    finally:
        GroupMember.WORLD = world
