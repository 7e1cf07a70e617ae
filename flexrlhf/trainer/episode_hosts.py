"""Processes of the environments of a rank's rows, on its own machine and on those that ``environment.nodes`` names."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from secrets import token_hex
from typing import Any

import torch.distributed as dist

from flexrlhf.comm.store import own_address
from flexrlhf.comm.world import World
from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.config.job_secret import MAKE, VARIABLE, derived_token, job_secret, signed, verified
from flexrlhf.environments.episodes import Episodes, make_process
from flexrlhf.errors import UserError
from flexrlhf.plan.environment_places import processes_by_rank
from flexrlhf.plan.plan import Plan
from flexrlhf.trainer.episode_server import EpisodeServer, RemoteProcess

Place = tuple[int, int]
"""The rank whose rows a process has, and its number among the processes of that rank."""


def open_episodes(plan: Plan, world: World, closing: ExitStack) -> Episodes | None:
    """Return the episodes of this rank's rows; None without an environment. All ranks call this.

    ``closing``: receives the end of the processes that this rank serves, which waits for the ranks that call them.
    Raises UserError if machines that call each other have no common secret.
    """
    settings = plan.spec.environment
    if settings is None or plan.spec.debug.replay is not None:
        return None
    by_rank, node = processes_by_rank(plan), plan.cluster.node_of(world.rank)
    apart = _processes_apart(plan, world)
    served = [place for place, other in apart.items() if other == node]
    if served and world.rank == plan.cluster.ranks_on_node(node)[0]:
        closing.enter_context(_serving(settings, served, node, plan, world))
    mine = {number: other for (rank, number), other in apart.items() if rank == world.rank}
    servers = {other: _server(other, plan, world) for other in {*mine.values()}}
    elsewhere = [
        RemoteProcess(other, **servers[other], path=_path(world.rank, number)) for number, other in mine.items()
    ]
    if mine:
        # behind the end of the processes that this rank calls
        closing.callback(_store(plan, world).set, f"closed/{world.rank}", "")
    return Episodes(settings, len(by_rank.get(world.rank, ())) - len(mine), elsewhere)


def _processes_apart(plan: Plan, world: World) -> dict[Place, int]:
    """Return the machine of each process that is not on the machine of its rank."""
    # several nodes of a plan may be one machine
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size:
        return {}
    return {
        (rank, number): node
        for rank, nodes in processes_by_rank(plan).items()
        for number, node in enumerate(nodes)
        if node != plan.cluster.node_of(rank)
    }


@contextmanager
def _serving(
    settings: EnvironmentSpec, places: Collection[Place], node: int, plan: Plan, world: World
) -> Iterator[None]:
    """Serve processes of ``node`` until the ranks that call them need them no more."""
    if not job_secret():
        raise UserError(f"{VARIABLE}: missing; environment.nodes has episodes run on other machines; {MAKE}")
    store, seconds = _store(plan, world), plan.spec.timeout_seconds
    processes = {_path(*place): make_process(settings) for place in places}
    host, nonce = own_address(world.host), token_hex()
    server = EpisodeServer(host, processes, derived_token(nonce), seconds, f"environments of node {node}")
    with server.serving():
        try:
            offer = json.dumps({"host": host, "port": server.port, "nonce": nonce})
            store.set(f"node/{node}", signed(f"node/{node}", offer))
            yield
            keys = {f"closed/{rank}": f"rank {rank}" for rank in sorted({rank for rank, _ in places})}
            world.wait_for(store, keys, "the end of the episodes", seconds)
        finally:
            for process in processes.values():
                process.close()


def _server(node: int, plan: Plan, world: World) -> dict[str, Any]:
    """Return host, port and token of the server of a machine."""
    store, key = _store(plan, world), f"node/{node}"
    world.wait_for(store, {key: f"node {node}"}, "the environments of other machines", plan.spec.timeout_seconds)
    offer = json.loads(verified(key, store.get(key).decode()))
    return {"host": offer["host"], "port": offer["port"], "token": derived_token(offer["nonce"])}


def _store(plan: Plan, world: World) -> dist.Store:
    return dist.PrefixStore(f"episodes/{plan.spec.name}", world.store)


def _path(rank: int, number: int) -> str:
    """Return the path of requests to a process."""
    return f"/{rank}/{number}"
