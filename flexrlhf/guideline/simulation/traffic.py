"""Bytes that the Moves and Syncs of a plan put on each link: inside nodes, and from node to node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flexrlhf.placement.cluster import Cluster
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move, Sync


@dataclass(frozen=True)
class Flow:
    """Bytes from one rank to another."""

    source: int
    destination: int
    size: int


@dataclass
class NodeBytes:
    """Bytes between the devices of one node, and between it and the other nodes."""

    within: float = 0.0
    sent: float = 0.0
    received: float = 0.0


def move_flows(plan: Plan, move: Move) -> list[Flow]:
    """Return the flows of a Move. All columns for one rank are one message; rows are sent padded."""
    samples = plan.batch.samples_per_prompt
    sizes: Counter[tuple[int, int]] = Counter()
    for transfer in move.transfers:
        size = len(transfer.prompts) * samples * plan.lengths.row_bytes(transfer.column)
        sizes[transfer.source, transfer.destination] += size
    return [Flow(source, destination, size) for (source, destination), size in sizes.items()]


def sync_flows(plan: Plan, sync: Sync) -> Iterator[Flow]:
    """Yield the flows of a Sync."""
    for (source, destination), size in plan.sync_links(sync).items():
        yield Flow(source, destination, round(size))


def bytes_by_node(flows: Iterable[tuple[Flow, float]], cluster: Cluster) -> dict[int, NodeBytes]:
    """Return the bytes of each node. ``flows``: each with how often it is due in a step."""
    nodes: dict[int, NodeBytes] = defaultdict(NodeBytes)
    for flow, share in flows:
        source, destination = (cluster.devices[rank].node for rank in (flow.source, flow.destination))
        if source == destination:
            nodes[source].within += share * flow.size
        else:
            nodes[source].sent += share * flow.size
            nodes[destination].received += share * flow.size
    return {node: nodes[node] for node in sorted({device.node for device in cluster.devices})}
