"""Launcher of a rank that torchrun or another system has started, a process for each device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.errors import UserError
from flexrlhf.launch.agreement import Member, agree
from flexrlhf.launch.devices import choose_device
from flexrlhf.launch.job import Job
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.worker import work
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan


class TorchrunLauncher:
    """Rank of a job, which this process is."""

    failures: tuple[type[Exception], ...] = ()

    def device(self, plan: Plan, hosts: Hosts) -> str:
        """Return the device of the ranks, by the devices of this machine."""
        num_local, ranks = num_torchrun_ranks(plan.placement.num_ranks), (int(os.environ["RANK"]),)
        return choose_device(plan.spec.cluster.device, num_local, plan.cluster.planned_gpu(ranks))

    def __call__(self, job: Job, max_restarts: int, factory: RankFactory | None) -> bool:
        return not work(job.orders, begin=partial(_agreed, job))


@contextmanager
def _agreed(job: Job, world: World) -> Iterator[bool]:
    """Make the directories of the runs once all machines agree, and yield whether this one mounts rank 0's.

    One rank of each machine compares.
    """
    store, seconds = dist.PrefixStore("agreement", world.store), job.plans[0].spec.timeout_seconds
    first, compares = world.first_here, world.rank == world.first_here
    member = Member(world.rank, world.size, world.host, "rank")
    shares = agree(store, member, job.plans, job.terms if compares else None, seconds)
    if compares:
        store.set(f"shares/{first}", str(int(shares)))
    else:
        world.wait_for(store, {f"shares/{first}": f"rank {first}"}, "the directories of the runs", seconds)
        shares = bool(int(store.get(f"shares/{first}")))
    with job.directories(world.rank == 0 or (compares and not shares)):
        world.meet("the directories of the runs", seconds)
        yield shares


def num_torchrun_ranks(num_planned: int) -> int:
    """Number of ranks that torchrun started on this node. Raises UserError unless all nodes have ``num_planned``."""
    value = os.environ.get("WORLD_SIZE", "")
    if not value.isdecimal():
        raise UserError(f"WORLD_SIZE: {value!r} in the environment of a rank; torchrun sets the number of ranks")
    size = int(value)
    if size != num_planned:
        raise UserError(
            f"cluster: {num_planned} devices planned, but torchrun started {size} ranks; "
            f"use --devices {size} or --nproc-per-node {num_planned}"
        )
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))
