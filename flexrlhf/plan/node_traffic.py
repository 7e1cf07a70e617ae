"""Bytes that a step of a plan puts on each link, inside nodes and from node to node: rows, weights, and what replicas
of a trained model on several nodes exchange."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move, Run, Sync
from flexrlhf.weights.shards import part_elements, trained_parts


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


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one node sends to others in a step.

    rows:       of moves
    weights:    of syncs
    gradients:  of sums over replicas, with the weights that these gather after an optimizer step
    passes:     models of which it gathers parts of the weights from other nodes in every pass
    """

    rows: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    passes: tuple[str, ...] = ()


def sent_bytes(plan: Plan) -> dict[int, SentBytes]:
    """Return the bytes that each node sends to others in a mean step; empty on one node."""
    nodes = range(plan.cluster.num_nodes)
    if len(nodes) == 1:
        return {}
    moves, syncs = _planned(plan, Move), _planned(plan, Sync)
    return {
        node: SentBytes(moves[node].sent, syncs[node].sent, _gradients(plan, node), tuple(_gathered(plan, node)))
        for node in nodes
    }


def _planned(plan: Plan, kind: type[Move] | type[Sync]) -> dict[int, NodeBytes]:
    flows = []
    for each in plan.schedule.instructions:
        if isinstance(each, kind):
            found = move_flows(plan, each) if isinstance(each, Move) else sync_flows(plan, each)
            flows += [(flow, 1 / getattr(each, "every", 1)) for flow in found]
    return bytes_by_node(flows, plan.cluster)


def _gradients(plan: Plan, node: int) -> float:
    """Return the bytes of float32 gradients that a node sends: 2 (n - 1) / n of them through a ring of n nodes.

    ZeRO moves as many: gradients once, and weights once (Rajbhandari et al. 2020, section 7).
    """
    total = 0.0
    for run in plan.schedule.instructions:
        if isinstance(run, Run) and run.operator.kind == "train":
            model = plan.placement[run.model]
            if model.role in plan.shapes and not _gathers(model):
                updates = len(run.mini_batches) * plan.spec.algorithm.epochs
                total += updates * sum(_ring_bytes(plan, model, ranks) for ranks in _summing(model, node, plan))
    return total


def _ring_bytes(plan: Plan, model: PlacedModel, ranks: tuple[int, ...]) -> float:
    nodes = len(set(map(plan.cluster.node_of, ranks)))
    stored = [trained_parts(model, plan.shapes[model.role], rank) for rank in ranks]
    elements = [part_elements(parts, list(parts)) for parts in stored]
    return 2 * (nodes - 1) / nodes * 4 * (sum(elements) if _is_sharded_over_all(model) else elements[0])


def _summing(model: PlacedModel, node: int, plan: Plan) -> set[tuple[int, ...]]:
    """Return the ranks, some on ``node``, that exchange gradients: a data-parallel group, or ranks of different nodes
    that store the same shards."""
    sets = model.layout.dp_set if _is_sharded_over_all(model) else model.copy_set
    return {sets(rank) for rank in model.ranks if plan.cluster.node_of(rank) == node}


def _is_sharded_over_all(model: PlacedModel) -> bool:
    return model.num_shards == model.layout.dp > 1


def _gathers(model: PlacedModel) -> bool:
    """Whether every pass gathers weights over all replicas."""
    return _is_sharded_over_all(model) and model.settings.zero == 3


def _gathered(plan: Plan, node: int) -> Iterator[str]:
    for model in plan.placement.models:
        sets = _summing(model, node, plan) if _gathers(model) else set()
        if any(len(set(map(plan.cluster.node_of, ranks))) > 1 for ranks in sets):
            yield model.name
