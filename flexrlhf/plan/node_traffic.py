"""Bytes that a step of a plan puts on each link, inside nodes and from node to node: rows, weights, and what replicas
of a trained model on several nodes exchange."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexrlhf.placement.layout import BatchShape
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.strategies.instructions import Instruction, Move, Run, Sync
from flexrlhf.text import bytes_text
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.sync_plan import SyncPlan

if TYPE_CHECKING:
    from flexrlhf.plan.plan import Plan


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

    def __str__(self) -> str:
        named = {"rows": self.rows, "weights": self.weights, "gradients": self.gradients}
        parts = [f"{bytes_text(round(size))} of {name}" for name, size in named.items() if size]
        parts += [f"shards of {name} in every pass" for name in self.passes]
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True)
class PlanTraffic:
    """Bytes of a plan on its links."""

    plan: Plan

    def move_bytes(self, move: Move, batch: BatchShape | None = None) -> int:
        """Return the bytes that cross between ranks when ``move`` runs once. ``batch``: of its evaluation, if any."""
        samples = (batch or self.plan.batch).samples_per_prompt
        return sum(len(t.prompts) * samples * self.plan.lengths.row_bytes(t.column) for t in move.transfers)

    def sync_bytes(self, sync: Sync) -> int | None:
        """Return the bytes that cross between ranks when ``sync`` runs once; None for an architecture yet unknown."""
        source, destination = self.plan.placement[sync.source], self.plan.placement[sync.destination]
        shape = self.plan.shapes.get(source.role)
        return None if shape is None else SyncPlan.all_bytes(source, destination, shape, self.plan.spec.sync.dtype)

    def sync_links(self, sync: Sync) -> Mapping[tuple[int, int], float]:
        """Return the bytes of ``sync_bytes`` by link (source, destination); empty for an unknown architecture."""
        source, destination = self.plan.placement[sync.source], self.plan.placement[sync.destination]
        shape, settings, node_of = self.plan.shapes.get(source.role), self.plan.spec.sync, self.plan.cluster.node_of
        if shape is None:
            return {}
        return SyncPlan.bytes_by_link(
            source, destination, shape, settings.bucket_bytes, node_of, settings.dtype, sync.overlaps
        )

    def _of_move(self, move: Move) -> list[Flow]:
        """Return the flows of a Move. All columns for one rank are one message; rows are sent padded."""
        samples = self.plan.batch.samples_per_prompt
        sizes: Counter[tuple[int, int]] = Counter()
        for transfer in move.transfers:
            size = len(transfer.prompts) * samples * self.plan.lengths.row_bytes(transfer.column)
            sizes[transfer.source, transfer.destination] += size
        return [Flow(source, destination, size) for (source, destination), size in sizes.items()]

    def _of_sync(self, sync: Sync) -> Iterator[Flow]:
        """Yield the flows of a Sync."""
        for (source, destination), size in self.sync_links(sync).items():
            yield Flow(source, destination, round(size))

    def flows(self, instruction: Instruction) -> Iterable[Flow]:
        """Return the flows of a Move or Sync; none of another instruction."""
        if isinstance(instruction, Move):
            return self._of_move(instruction)
        return self._of_sync(instruction) if isinstance(instruction, Sync) else ()

    def by_node(self, flows: Iterable[tuple[Flow, float]]) -> dict[int, NodeBytes]:
        """Return the bytes of each node. ``flows``: each with how often it is due in a step."""
        nodes: dict[int, NodeBytes] = defaultdict(NodeBytes)
        for flow, share in flows:
            source, destination = (self.plan.cluster.devices[rank].node for rank in (flow.source, flow.destination))
            if source == destination:
                nodes[source].within += share * flow.size
            else:
                nodes[source].sent += share * flow.size
                nodes[destination].received += share * flow.size
        return {node: nodes[node] for node in sorted({device.node for device in self.plan.cluster.devices})}

    @property
    def sent(self) -> dict[int, SentBytes]:
        """Bytes that each node sends to others in a mean step; empty on one node."""
        nodes = range(self.plan.cluster.num_nodes)
        if len(nodes) == 1:
            return {}
        moves, syncs = self._planned(Move), self._planned(Sync)
        gradients, gathered = self._gradients(), self._gathered()
        return {node: SentBytes(moves[node].sent, syncs[node].sent, gradients[node], gathered[node]) for node in nodes}

    def _planned(self, kind: type[Move] | type[Sync]) -> dict[int, NodeBytes]:
        flows = []
        for each in self.plan.schedule.instructions:
            if isinstance(each, kind):
                found = self._of_move(each) if isinstance(each, Move) else self._of_sync(each)
                flows += [(flow, 1 / getattr(each, "every", 1)) for flow in found]
        return self.by_node(flows)

    def _gradients(self) -> Mapping[int, float]:
        """Return the bytes of float32 gradients that each node sends: 2 (n - 1) / n of them through a ring of n nodes.

        ZeRO moves as many: gradients once, and weights once (Rajbhandari et al. 2020, section 7).
        """
        total: dict[int, float] = defaultdict(float)
        for run in self.plan.schedule.instructions:
            if isinstance(run, Run) and run.operator.kind == "train":
                model = self.plan.placement[run.model]
                if model.role in self.plan.shapes and not _gathers(model):
                    updates = len(run.mini_batches) * self.plan.spec.algorithm.epochs
                    for node, size in self._ring_bytes(model).items():
                        total[node] += updates * size
        return total

    def _ring_bytes(self, model: PlacedModel) -> Mapping[int, float]:
        """Return the bytes that each node sends when the gradients of ``model`` are summed once."""
        shape, found = self.plan.shapes[model.role], defaultdict[int, float](float)

        def elements_on(rank: int) -> int:
            parts = shape.trained_parts(model, rank)
            return part_elements(parts, list(parts))

        elements = model.by_position(elements_on)
        for ranks in _summing(model):
            nodes = set(map(self.plan.cluster.node_of, ranks))
            summed = sum(map(elements.__getitem__, ranks)) if _is_sharded_over_all(model) else elements[ranks[0]]
            for node in nodes:
                found[node] += 2 * (len(nodes) - 1) / len(nodes) * 4 * summed
        return found

    def _gathered(self) -> Mapping[int, tuple[str, ...]]:
        """Return by node the models whose weights every pass gathers from other nodes, too."""
        found: dict[int, tuple[str, ...]] = defaultdict(tuple)
        for model in filter(_gathers, self.plan.placement.models):
            sets = [set(map(self.plan.cluster.node_of, ranks)) for ranks in _summing(model)]
            for node in set().union(*(nodes for nodes in sets if len(nodes) > 1)):
                found[node] += (model.name,)
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
