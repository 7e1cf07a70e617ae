"""Bytes that a step of a plan puts on each link, inside nodes and from node to node: rows, weights, and what replicas
of a trained model on several nodes exchange."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Move, Run, Sync
from flexrlhf.weights.shards import by_position, part_elements, trained_parts


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
    gradients, gathered = _gradients(plan), _gathered(plan)
    return {node: SentBytes(moves[node].sent, syncs[node].sent, gradients[node], gathered[node]) for node in nodes}


def _planned(plan: Plan, kind: type[Move] | type[Sync]) -> dict[int, NodeBytes]:
    flows = []
    for each in plan.schedule.instructions:
        if isinstance(each, kind):
            found = move_flows(plan, each) if isinstance(each, Move) else sync_flows(plan, each)
            flows += [(flow, 1 / getattr(each, "every", 1)) for flow in found]
    return bytes_by_node(flows, plan.cluster)


def _gradients(plan: Plan) -> Mapping[int, float]:
    """Return the bytes of float32 gradients that each node sends: 2 (n - 1) / n of them through a ring of n nodes.

    ZeRO moves as many: gradients once, and weights once (Rajbhandari et al. 2020, section 7).
    """
    total: dict[int, float] = defaultdict(float)
    for run in plan.schedule.instructions:
        if isinstance(run, Run) and run.operator.kind == "train":
            model = plan.placement[run.model]
            if model.role in plan.shapes and not _gathers(model):
                updates = len(run.mini_batches) * plan.spec.algorithm.epochs
                for node, size in _ring_bytes(plan, model).items():
                    total[node] += updates * size
    return total


def _ring_bytes(plan: Plan, model: PlacedModel) -> Mapping[int, float]:
    """Return the bytes that each node sends when the gradients of ``model`` are summed once."""
    shape, found = plan.shapes[model.role], defaultdict[int, float](float)

    def elements_on(rank: int) -> int:
        parts = trained_parts(model, shape, rank)
        return part_elements(parts, list(parts))

    elements = by_position(model, elements_on)
    for ranks in _summing(model):
        nodes = set(map(plan.cluster.node_of, ranks))
        summed = sum(map(elements.__getitem__, ranks)) if _is_sharded_over_all(model) else elements[ranks[0]]
        for node in nodes:
            found[node] += 2 * (len(nodes) - 1) / len(nodes) * 4 * summed
    return found


def _summing(model: PlacedModel) -> Iterable[tuple[int, ...]]:
    """Return the sets of ranks that exchange gradients: data-parallel groups, or ranks of different nodes with the same
    shards."""
    return dict.fromkeys(
        map(model.layout.of_weights.dp_set if _is_sharded_over_all(model) else model.copy_set, model.ranks)
    )


def _is_sharded_over_all(model: PlacedModel) -> bool:
    return model.num_shards == model.layout.of_weights.dp > 1


def _gathers(model: PlacedModel) -> bool:
    """Whether every pass gathers weights over all replicas."""
    return _is_sharded_over_all(model) and model.settings.zero == 3


def _gathered(plan: Plan) -> Mapping[int, tuple[str, ...]]:
    """Return by node the models whose weights every pass gathers from other nodes, too."""
    found: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for model in filter(_gathers, plan.placement.models):
        sets = [set(map(plan.cluster.node_of, ranks)) for ranks in _summing(model)]
        for node in set().union(*(nodes for nodes in sets if len(nodes) > 1)):
            found[node] += (model.name,)
    return found
