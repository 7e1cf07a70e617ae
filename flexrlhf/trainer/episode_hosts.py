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
from flexrlhf.environments.episode_process import make_process
from flexrlhf.environments.episodes import Episodes
from flexrlhf.errors import UserError
from flexrlhf.plan.environment_places import processes_by_rank
from flexrlhf.plan.plan import Plan
from flexrlhf.trainer.episode_server import EpisodeServer, FixedProcesses, RemoteProcess
from flexrlhf.trainer.episode_service import service_process

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
    node = plan.cluster.node_of(world.rank)
    own = processes_by_rank(plan).get(world.rank, ())
    apart = _processes_apart(plan, world)
    served = [place for place, other in apart.items() if other == node]
    if served and world.rank == plan.cluster.ranks_on_node(node)[0]:
        closing.enter_context(_serving(settings, served, node, plan, world))
    mine = {number: other for (rank, number), other in apart.items() if rank == world.rank}
    servers = {other: _server(other, plan, world) for other in dict.fromkeys(mine.values())}
    elsewhere = []
    for number, other in mine.items():
        name = f"node {other} at {servers[other]['host']}"
        elsewhere.append(RemoteProcess(("environment.nodes", name), **servers[other], path=_path(world.rank, number)))
    further = [each for each in own if isinstance(each, str)]
    attempt = f"{plan.spec.name}/{world.rank}/{token_hex(8)}"
    elsewhere += [service_process(settings, each, f"{attempt}/{number}") for number, each in enumerate(further)]
    for process in {each.setting: each for each in elsewhere if each.setting[1] in further}.values():
        process.check()
    if mine:
        # behind the end of the processes that this rank calls
        closing.callback(_store(plan, world).set, f"closed/{world.rank}", "")
    return Episodes(settings, len(own) - len(elsewhere), elsewhere, plan.batch.num_chunks)


def _processes_apart(plan: Plan, world: World) -> dict[Place, int]:
    """Return the node of each process that is on another node than its rank."""
    # several nodes of a plan may be one machine
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size:
        return {}
    return {
        (rank, number): node
        for rank, machines in processes_by_rank(plan).items()
        for number, node in enumerate(machines)
        if isinstance(node, int) and node != plan.cluster.node_of(rank)
    }


@contextmanager
def _serving(
    settings: EnvironmentSpec, places: Collection[Place], node: int, plan: Plan, world: World
) -> Iterator[None]:
    """Serve processes of ``node`` until the ranks that call them need them no more."""
    if not job_secret():
        raise UserError(f"{VARIABLE}: missing; environment.nodes has episodes run on other machines; {MAKE}")
    store, seconds = _store(plan, world), plan.spec.timeout_seconds
    processes = FixedProcesses({_path(*place): make_process(settings) for place in places})
    host, nonce = own_address(world.host), token_hex()
    what = f"environments of node {node}"
    server = EpisodeServer(host, processes, derived_token(nonce), seconds, len(places), what)
    with server.serving():
        try:
            offer = json.dumps({"host": host, "port": server.port, "nonce": nonce})
            store.set(f"node/{node}", signed(f"node/{node}", offer))
            yield
            keys = {f"closed/{rank}": f"rank {rank}" for rank in sorted({rank for rank, _ in places})}
            world.wait_for(store, keys, "the end of the episodes", seconds)
        finally:
            processes.close()


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
