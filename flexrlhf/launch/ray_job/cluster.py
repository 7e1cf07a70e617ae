"""Ray cluster of a job: the connection to it, and what it offers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from flexrlhf.errors import UserError
from flexrlhf.launch.start import signal_handlers_restored

CONNECT_SECONDS = 10.0


def require_ray() -> None:
    """Raise UserError where Ray is not installed."""
    if find_spec("ray") is None:
        raise UserError("--launcher ray: needs the package ray, which is not installed; pip install 'flexrlhf[ray]'")


@contextmanager
def connected() -> Iterator[None]:
    """Connect to a Ray cluster, and leave it at the end. A connection that the caller has made stays.

    The cluster is that of RAY_ADDRESS, which a submitted job has, else one on this machine, else one that is started
    for the job. Raises UserError where none responds.
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
    """Raise UserError where nothing listens at ``HOST:PORT``, for which Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(f"RAY_ADDRESS {address}: no Ray cluster responds ({error.strerror or error})") from None


def ray_nodes() -> list[dict[str, float]]:
    """Return the resources of each Ray node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def is_alive(ray_node: str) -> bool:
    """Return whether a Ray node is alive, by its identifier."""
    import ray

    return any(node["NodeID"] == ray_node and node["Alive"] for node in ray.nodes())


def ray_device(setting: str, num_ranks: int) -> str:
    """Return ``cpu`` or ``cuda`` for all ranks, given ``cluster.device``.

    ``auto`` is CUDA where the Ray cluster has a GPU for every rank. Raises UserError for ``cuda`` with fewer.
    """
    if setting == "cpu":
        return setting
    with connected():
        gpus = int(sum(node.get("GPU", 0) for node in ray_nodes()))
    if setting == "cuda" and gpus < num_ranks:
        raise UserError(f"cluster.device: cuda needs a GPU of Ray for each of {num_ranks} ranks, found {gpus}; use cpu")
    return "cuda" if gpus >= num_ranks else "cpu"
