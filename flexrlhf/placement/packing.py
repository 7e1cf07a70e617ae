"""Placed models side by side in lanes: first fit in vector order, along node boundaries.

A lane is the list of ranks once over; two models in one lane never overlap. ``[0.5, 0.5, 0.5, 0.5]`` on 8 ranks::

    lane 0   actor  0 1 2 3   critic 4 5 6 7
    lane 1   ref    0 1 2 3   reward 4 5 6 7
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flexrlhf.placement.cluster import Cluster


@dataclass(frozen=True)
class DeviceRequest:
    """A placed model that needs ``count`` devices."""

    name: str
    count: int


@dataclass
class Packing:
    """Ranks by placed model, and warnings that name the models that straddle two nodes."""

    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def pack(requests: list[DeviceRequest], ranks: tuple[int, ...], cluster: Cluster) -> Packing:
    """Assign consecutive positions of ``ranks`` to every request. A request never exceeds ``len(ranks)``."""
    nodes = [cluster.devices[rank].node for rank in ranks]
    lanes: list[int] = []  # positions used in each lane
    packing = Packing()
    for request in requests:
        assert 0 < request.count <= len(ranks), f"{request} on {len(ranks)} ranks"
        lane = next((i for i, used in enumerate(lanes) if used + request.count <= len(ranks)), len(lanes))
        if lane == len(lanes):
            lanes.append(0)
        start = _start(nodes, lanes[lane], request.count)
        end = lanes[lane] = start + request.count
        packing.ranks[request.name] = ranks[start:end]
        if start and _straddles(nodes, start, request.count):
            packing.warnings.append(f"{request.name} straddles nodes {nodes[start]} and {nodes[end - 1]}")
    return packing


def _straddles(nodes: list[int], start: int, count: int) -> bool:
    """Whether a model that starts inside a node leaves it."""
    return start > 0 and nodes[start - 1] == nodes[start] != nodes[start + count - 1]


def _start(nodes: list[int], used: int, count: int) -> int:
    """Return the lane's next free position, or the next node boundary where that avoids a straddle and still fits."""
    if used and _straddles(nodes, used, count):
        boundaries = (i for i in range(used, len(nodes)) if nodes[i - 1] != nodes[i])
        boundary = next(boundaries, len(nodes))
        if boundary + count <= len(nodes):
            return boundary
    return used
