"""Ray cluster of a job: the connection to it, its resources, and the reservation of a plan's devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from flexrlhf.comm.store import Notice
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch.start import signal_handlers_restored
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.ray_bundles import Bundle, check_capacity, node_bundles, resources_text, total_of

CONNECT_SECONDS = 10.0
WAIT_SECONDS = 900.0
"""Longest wait for devices that other jobs of the Ray cluster use."""


def require_ray() -> None:
    """Raise UserError if Ray is not installed."""
    if find_spec("ray") is None:
        raise UserError("--launcher ray: needs the package ray, which is not installed; pip install 'flexrlhf[ray]'")


@contextmanager
def connected() -> Iterator[None]:
    """Connect to a Ray cluster, and leave it at the end. A connection that the caller has made stays.

    The cluster is that of RAY_ADDRESS, which a submitted job has, else one on this machine, else one that is started
    for the job. Raises UserError if none responds.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        # Ray sets a handler of SIGTERM
        with signal_handlers_restored():
            ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"--launcher ray: no Ray cluster responds: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise UserError if nothing listens at ``HOST:PORT``, for which Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"RAY_ADDRESS {address}: no Ray cluster responds ({error.strerror or error})") from None


def ray_device(setting: str, num_ranks: int) -> str:
    """Return ``cpu`` or ``cuda`` for all ranks, given ``cluster.device``.

    ``auto`` is CUDA if the Ray cluster has a GPU for every rank. Raises UserError for ``cuda`` with fewer.
    """
    if setting == "cpu":
        return setting
    with connected():
        gpus = int(sum(node.get("GPU", 0) for node in _resources_of_nodes()))
    if setting == "cuda" and gpus < num_ranks:
        raise UserError(f"cluster.device: cuda needs a GPU of Ray for each of {num_ranks} ranks, found {gpus}; use cpu")
    return "cuda" if gpus >= num_ranks else "cpu"


def is_alive(ray_node: str) -> bool:
    """Return whether a Ray node is alive, by its identifier."""
    import ray

    return any(node["NodeID"] == ray_node and node["Alive"] for node in ray.nodes())


def _resources_of_nodes() -> list[dict[str, float]]:
    """Return the resources of each Ray node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def reserved(cluster: Cluster, device: str, seconds: float = WAIT_SECONDS) -> Iterator[tuple[tuple[Bundle, ...], Any]]:
    """Yield the bundle of each planned node and their placement group once Ray has reserved it; it ends with the body.

    Raises UserError if the Ray cluster is too small, RunStopped if its devices are not free in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes = _resources_of_nodes()
    bundles = node_bundles(cluster, device, {name for node in nodes for name in node})
    check_capacity(bundles, nodes)
    need = total_of(bundles)
    group = placement_group(list(map(dict, bundles)), strategy="PACK")
    notice = Notice("the job waits for devices of Ray")
    try:
        while not group.wait(1):
            free = ray.available_resources()
            here = resources_text({name: free.get(name, 0) for name in need})
            detail = f"the plan needs {resources_text(need)}, free in Ray: {here}"
            notice.update(detail)
            if notice.seconds > seconds:
                raise RunStopped(f"{notice.what}: {detail}; gave up after {seconds:g} s")
        yield bundles, group
    finally:
        remove_placement_group(group)
