"""Reservation of a plan's devices in a Ray cluster, as placement groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexrlhf.comm.store import Notice
from flexrlhf.errors import RunStopped
from flexrlhf.launch.ray_job.cluster import ray_nodes
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.ray_bundles import NodeBundles, check_capacity, node_bundles, resources_text

WAIT_SECONDS = 900.0
"""Longest wait for devices that other jobs of the Ray cluster use."""


@contextmanager
def reserved(cluster: Cluster, device: str, seconds: float = WAIT_SECONDS) -> Iterator[list[tuple[NodeBundles, Any]]]:
    """Yield a placement group for each planned node once Ray has reserved all of them; they are removed at the end.

    Raises UserError where the Ray cluster is too small, RunStopped where its devices are not free in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes = ray_nodes()
    groups = node_bundles(cluster, device, {name for node in nodes for name in node})
    check_capacity(groups, nodes)
    made = [placement_group([dict(each) for each in group.bundles], strategy="STRICT_PACK") for group in groups]
    try:
        _await(groups, made, seconds)
        yield list(zip(groups, made, strict=True))
    finally:
        for group in made:
            remove_placement_group(group)


def _await(groups: Sequence[NodeBundles], made: Sequence[Any], seconds: float) -> None:
    notice = Notice("the job waits for devices of Ray")
    for group, handle in zip(groups, made, strict=True):
        while not handle.wait(1):
            detail = f"node {group.node} of the plan needs {resources_text(group.total)}, {_free(group)}"
            notice.update(detail)
            if notice.seconds > seconds:
                raise RunStopped(f"{notice.what}: {detail}; gave up after {seconds:g} s")


def _free(group: NodeBundles) -> str:
    """Return what is free in the whole Ray cluster of the resources that a group takes."""
    import ray

    free = ray.available_resources()
    return f"free in Ray: {resources_text({name: free.get(name, 0) for name in group.total})}"
