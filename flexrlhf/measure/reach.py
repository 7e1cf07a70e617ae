"""Reach of the machines: one rank of each listens where gloo would, and connects to those of all others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch.distributed as dist

from flexrlhf.comm.interfaces import address_of
from flexrlhf.comm.world import World
from flexrlhf.measure.facts import HostFacts

CONNECT_SECONDS = 5.0
"""Longest attempt to connect to a machine."""
_AT_ONCE = 16


def unreachable(world: World, store: dist.Store, host: HostFacts, hosts: Sequence[HostFacts], seconds: float) -> str:
    """Return which of the other machines ``host`` does not reach, as one sentence; empty where it reaches all.

    Called by the first rank of every machine at the same time; none stops to listen before all have tried.
    """
    with _listening(host) as address:
        store.set(f"listens/{host.node}", json.dumps(address))
        others = [other for other in hosts if other.node != host.node]
        keys = {f"listens/{other.node}": f"rank {other.ranks[0]}" for other in others}
        world.wait_for(store, keys, "the addresses of all machines", seconds)
        targets = [json.loads(store.get(key)) for key in keys]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            problems = list(threads.map(_problem, targets))
        store.set(f"tried/{host.node}", "")
        tried = {f"tried/{other.node}": f"rank {other.ranks[0]}" for other in others}
        world.wait_for(store, tried, "the connections between machines", 2 * seconds)
    return "; ".join(
        f"{host.name} does not reach {target[0]}:{target[1]} of {other.name} ({problem})"
        for other, target, problem in zip(others, targets, problems, strict=True)
        if problem
    )


@contextmanager
def _listening(host: HostFacts) -> Iterator[tuple[str, int]]:
    """Listen at a free port, and yield the address and the port."""
    address = _own_address(host.host)
    with socket.create_server((address, 0), backlog=1024) as listener:
        yield address, listener.getsockname()[1]


def _own_address(name: str) -> str:
    """Return the IPv4 address where gloo listens: of the interface in its variable, else that of the host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    found = address_of(interface) if interface else None
    try:
        return found or socket.gethostbyname(name)
    except socket.gaierror:
        return "127.0.0.1"


def _problem(target: tuple[str, int]) -> str:
    """Return why no connection can be made; empty where one can."""
    try:
        with socket.create_connection((target[0], target[1]), timeout=CONNECT_SECONDS):
            return ""
    except TimeoutError:
        return "no response"
    except OSError as error:
        return (error.strerror or str(error)).lower()
