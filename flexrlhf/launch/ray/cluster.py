"""Ray cluster of a job: the connection to it, its resources, and the reservation of a plan's devices.

The reservation is a placement group with a bundle for each planned node, with all its devices. Ray keeps a bundle on
one of its nodes, so that tensor parallel stays inside a node and rank r is where the plan has it. Two planned nodes may
share a Ray node that is large enough for both.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

from flexrlhf.api import Cluster, ClusterSpec, Ending, HostPort, RunStopped, UserError, handled
from flexrlhf.api.engine import Notice

CONNECT_SECONDS = 10.0
WAIT_SECONDS = 900.0
"""Longest wait for devices that other jobs of the Ray cluster use."""
CLASS_SHARE = 0.001
"""Amount of a class's resource that a bundle takes: it chooses nodes and limits nothing."""
ACCELERATOR = "accelerator_type:"
"""Beginning of the resource that Ray gives to nodes with a known kind of GPU."""
OWN = "flexrlhf_"
"""Beginning of a resource with which a user marks the nodes of a device class."""
_CURRENT_CLUSTER = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
"""File of Ray with the address of a cluster that was started on this machine."""
Bundle = Mapping[str, float]
"""Resources of one planned node, by their names in Ray."""


def require_ray() -> None:
    """Raise UserError if Ray is not installed."""
    if find_spec("ray") is None:
        raise UserError("--launcher ray: needs the package ray, which is not installed; pip install 'flexrlhf[ray]'")


@contextmanager
def connected() -> Iterator[None]:
    """Connect to a Ray cluster, and leave it at the end. A connection that the caller has made stays.

    The cluster is that of RAY_ADDRESS, which a submitted job has, else one on this machine, else one that is started
    for the job, with a token of Ray, whose ports are on all interfaces. Raises UserError if none responds.
    """
    # Ray reads these variables when it is imported
    if "ray" not in sys.modules and "RAY_ADDRESS" not in os.environ and not _CURRENT_CLUSTER.exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex())
    import ray

    if ray.is_initialized():
        yield
        return
    check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        # Ray sets a handler of SIGTERM
        with handled(Ending()):
            ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"--launcher ray: no Ray cluster responds: {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raise UserError if nothing listens at ``HOST:PORT``, for which Ray would wait for minutes."""
    endpoint = HostPort.parse(address)
    if endpoint is None:
        return
    try:
        socket.create_connection(endpoint, CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"RAY_ADDRESS {address}: no Ray cluster responds ({reason})") from None


def ray_device(setting: str, num_ranks: int, planned: str = "") -> str:
    """Return ``cpu`` or ``cuda`` for all ranks, given ``cluster.device``.

    ``auto`` is CUDA if the Ray cluster has a GPU for every rank. Raises UserError for ``cuda`` with fewer, and for
    ``auto`` if ``planned`` is a GPU of the plan (``planned_gpu``).
    """
    if setting == "cpu":
        return setting
    with connected():
        gpus = int(sum(node.get("GPU", 0) for node in _resources_of_nodes()))
    if setting == "cuda" and gpus < num_ranks:
        raise UserError(f"cluster.device: cuda needs a GPU of Ray for each of {num_ranks} ranks, found {gpus}; use cpu")
    if planned and gpus < num_ranks:
        raise UserError(
            f"{planned}, and the Ray cluster has {gpus or 'none'} for {num_ranks} ranks; write {ClusterSpec.ON_CPUS}"
        )
    return "cuda" if gpus >= num_ranks else "cpu"


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


def node_bundles(cluster: Cluster, device: str, offered: Collection[str]) -> tuple[Bundle, ...]:
    """Return the bundle of each node of ``cluster``: a CPU and, with CUDA, a GPU for each of its devices.

    device:   ``cpu`` or ``cuda``, of all ranks
    offered:  names of the resources of the Ray cluster

    Raises UserError if Ray cannot distinguish the device classes of the plan.
    """
    resources = class_resources(cluster.classes, device, offered)
    bundles = []
    for node in range(cluster.num_nodes):
        ranks = cluster.ranks_on_node(node)
        bundle = dict.fromkeys(("GPU", "CPU") if device == "cuda" else ("CPU",), float(len(ranks)))
        classes = (resources.get(cluster.devices[rank].device_class) for rank in ranks)
        bundles.append(bundle | {name: CLASS_SHARE for name in classes if name is not None})
    return tuple(bundles)


def class_resources(classes: Sequence[str], device: str, offered: Collection[str]) -> dict[str, str]:
    """Return the resource by which Ray finds the nodes of each class. One class needs none.

    Raises UserError if several classes have none, or two the same.
    """
    found = {name: resource for name in classes if (resource := _resource_of(name, device, offered)) is not None}
    if len(classes) == 1:
        return found
    for number, name in enumerate(classes):
        if name not in found:
            raise UserError(
                f"--launcher ray: no Ray node offers a resource of the class {name}, so its devices are not "
                f"distinguished from others; start its nodes with --resources '{{\"{OWN}{name}\": 1}}'"
            )
        same = next((each for each in classes[:number] if found[each] == found[name]), None)
        if same is not None:
            raise UserError(
                f"--launcher ray: Ray has the one resource {found[name]} for the classes {same} and {name}; start "
                f"their nodes with --resources '{{\"{OWN}{same}\": 1}}' and '{{\"{OWN}{name}\": 1}}'"
            )
    return found


def _resource_of(name: str, device: str, offered: Collection[str]) -> str | None:
    """Return the resource of a class that the cluster offers: a user's own one, else Ray's for that kind of GPU."""
    if name == Cluster.ANY_CLASS:
        return None
    kinds = [f"{ACCELERATOR}{name}", f"{ACCELERATOR}{name.partition('-')[0]}"] if device == "cuda" else []
    return next((each for each in (f"{OWN}{name}", *kinds) if each in offered), None)


def check_capacity(bundles: Sequence[Bundle], ray_nodes: Sequence[Bundle]) -> None:
    """Raise UserError if the Ray cluster is too small, whatever else it runs. ``ray_nodes``: resources of each."""
    for node, bundle in enumerate(bundles):
        if not any(_fits(bundle, each) for each in ray_nodes):
            raise UserError(
                f"--launcher ray: node {node} of the plan needs {resources_text(bundle)} on one Ray node; "
                f"Ray has {nodes_text(ray_nodes, bundle)}"
            )
    need = total_of(bundles)
    if not _fits(need, total_of(ray_nodes)):
        raise UserError(f"--launcher ray: the plan needs {resources_text(need)}; Ray has {nodes_text(ray_nodes, need)}")


def total_of(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Return the resources of all bundles together."""
    names = dict.fromkeys(name for each in bundles for name in each)
    return {name: sum(each.get(name, 0.0) for each in bundles) for name in names}


def nodes_text(ray_nodes: Sequence[Bundle], names: Collection[str]) -> str:
    """Return the amounts that Ray nodes have of the resources ``names``."""
    kinds = [resources_text({name: node.get(name, 0) for name in names}) for node in ray_nodes]
    counts = {kind: kinds.count(kind) for kind in kinds}
    listed = "; ".join(f"{count} with {kind}" for kind, count in counts.items())
    return f"{len(kinds)} node{'' if len(kinds) == 1 else 's'}{': ' if listed else ''}{listed}"


def resources_text(resources: Bundle) -> str:
    """Return resources as ``2 CPU, flexrlhf_big``; a class's is named without its share."""
    shown = [f"{value:g} {name}" for name, value in resources.items() if not _is_class(name)]
    return ", ".join([*shown, *(name for name, value in resources.items() if _is_class(name) and value)])


def _is_class(name: str) -> bool:
    return name.startswith((OWN, ACCELERATOR))


def _fits(need: Bundle, available: Bundle) -> bool:
    return all(available.get(name, 0.0) >= value for name, value in need.items())
