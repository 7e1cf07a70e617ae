"""Time of collectives and messages, and of rows and weights between two placed models.

The simulator prices the Moves and Syncs of a plan with it, the search the exchanges of a candidate whose rows are not
routed yet: both take the layouts of the models and not their ranks, and get the same times. Bytes are the busiest
rank's; on a cluster of several nodes they are counted as crossing between nodes unless both models fit the same devices
of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, log2, sqrt
from pathlib import Path

from flexrlhf.api import OF_EXPERTS, ParallelDims, Primitive
from flexrlhf.guideline.costs.cost_model import Cost, CostModel, Links, Traffic
from flexrlhf.guideline.costs.profiles import named_rows, read_table
from flexrlhf.guideline.costs.relations import Relation

TransferTime = Callable[[float], float]
"""Time by bytes."""


@dataclass(frozen=True)
class LinkFigures:
    """Part of a link's bandwidth that is reached (``links.csv``), fitted by ``benchmarks/calibration/links.py``.

    message_seconds:     start of a message between two ranks
    collective_seconds:  start of a collective
    hop_seconds:         delay of a hop from one rank of a ring, or node of a tree, to the next
    share:               share of the bandwidth that long messages reach
    slow_bytes:          collectives of as many bytes take twice as long as at that share
    """

    message_seconds: float
    collective_seconds: float
    hop_seconds: float
    share: float
    slow_bytes: float

    def collective(self, gb_s: float) -> TransferTime:
        """Return the time of bytes through a link of ``gb_s``, without hops; the square root's term: short collectives
        fill the link less."""
        start, slow, bytes_s = self.collective_seconds, self.slow_bytes, self.share * gb_s * 1e9
        return lambda size: start + (size + sqrt(size * slow)) / bytes_s

    def message(self, size: float, gb_s: float) -> float:
        """Return the time of a message without its start."""
        return size / (self.share * gb_s * 1e9)


_FIGURES = named_rows(LinkFigures, read_table(Path(__file__).with_suffix(".csv")))
WITHIN, ACROSS = _FIGURES["within"], _FIGURES["across"]
AS_GIVEN = LinkFigures(message_seconds=0.0, collective_seconds=0.0, hop_seconds=0.0, share=1.0, slow_bytes=0.0)
"""A link whose bandwidth is given as it is reached."""
Figures = tuple[LinkFigures, LinkFigures]


def all_reduce_seconds(
    size: float, ranks: int, per_node: int, links: Links, groups: int = 1, figures: Figures = (WITHIN, ACROSS)
) -> float:
    """Return the time of ``size`` bytes on each of ``ranks``, ``per_node`` of them in a node: reduce-scatter and
    all-gather. ``groups`` such collectives run at once and share each node's link. Nodes are a tree, up and down."""
    return all_reduces(ranks, per_node, links, groups, figures)(size)


def all_reduces(
    ranks: int, per_node: int, links: Links, groups: int = 1, figures: Figures = (WITHIN, ACROSS)
) -> TransferTime:
    """Return ``all_reduce_seconds`` by the bytes, for many sizes."""
    if ranks <= 1:
        return lambda size: 0.0
    hops = 2 * ceil(log2(_nodes(ranks, per_node))) * figures[1].hop_seconds
    passed_on = _passed_on(ranks, per_node, links, groups, figures)
    return lambda size: hops + passed_on(2 * size)


def gather_seconds(
    size: float,
    ranks: int,
    per_node: int,
    links: Links,
    groups: int = 1,
    pieces: int = 1,
    figures: Figures = (WITHIN, ACROSS),
) -> float:
    """Return the time of all-gathers or reduce-scatters of ``size`` bytes in total, otherwise as an all-reduce.

    ``pieces``: collectives of equal parts, one after the other, as of the layers of a model. Each goes through a ring
    of all ranks.
    """
    if ranks <= 1:
        return 0.0
    within, across = figures
    nodes = _nodes(ranks, per_node)
    hops = (ranks - nodes) * within.hop_seconds + (nodes if nodes > 1 else 0) * across.hop_seconds
    return pieces * (hops + _passed_on(ranks, per_node, links, groups, figures)(size / pieces))


def _nodes(ranks: int, per_node: int) -> int:
    return ceil(ranks / per_node)


def _passed_on(ranks: int, per_node: int, links: Links, groups: int, figures: Figures) -> TransferTime:
    """Return the time in which ranks pass on ``(n - 1) / n`` of the bytes, and nodes as much through their own links;
    the slower of both counts."""
    within, across = figures
    share, inside = (ranks - 1) / ranks, within.collective(links.device_gb_s)
    if ranks <= per_node:
        return lambda size: inside(share * size)
    nodes = _nodes(ranks, per_node)
    of_node, between = (nodes - 1) / nodes, across.collective(links.node_gb_s / groups)
    if per_node <= 1:
        return lambda size: max(0.0, between(of_node * size))
    return lambda size: max(inside(share * size), between(of_node * size))


def travel_seconds(traffic: Traffic, links: Links, figures: Figures = (WITHIN, ACROSS)) -> float:
    """Return the time of point-to-point messages."""
    within, across = figures
    start = across.message_seconds if traffic.across else within.message_seconds
    inside = within.message(traffic.within, links.device_gb_s)
    return traffic.messages * start + max(inside, across.message(traffic.across, links.node_gb_s))


def sync_cost(traffic: Traffic, gathered: Traffic, num_tensors: int, links: Links) -> Cost:
    """Return the time of a Sync: ``gathered`` by the source, ``traffic`` sent, and a launch for each tensor."""
    gather = max(WITHIN.message(gathered.within, links.device_gb_s), ACROSS.message(gathered.across, links.node_gb_s))
    return Cost({"gather": gather, "send": travel_seconds(traffic, links), "launch": num_tensors * 20e-6})


@dataclass(frozen=True)
class MeshSide:
    """One end of an exchange: how a placed model is laid out.

    size:      devices
    per_node:  devices in a node
    dp:        replicas
    dims:      degree of each axis; the ranks of a stage are next to each other
    zero:      ZeRO stage
    shards:    ranks that together store all weights; 1: each has them whole
    """

    size: int
    per_node: int
    dp: int
    dims: ParallelDims = ParallelDims()
    zero: int = 0
    shards: int = 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, computed once: sides are keys of many tables."""
        return hash((self.size, self.per_node, self.dp, self.dims, self.zero, self.shards))

    @cached_property
    def of_rows(self) -> MeshSide:
        """The same side with defaults for what moving rows does not depend on."""
        return _first_equal(replace(self, zero=0, shards=1, dims=self.dims.without(OF_EXPERTS)))

    @cached_property
    def replica(self) -> int:
        """Ranks of a replica, which all have its rows."""
        return self.dims.replica

    @cached_property
    def parts(self) -> int:
        """Ranks that together compute with all weights."""
        return self.dims.parts

    @property
    def nodes(self) -> int:
        """Nodes with devices of it."""
        return ceil(self.size / self.per_node)

    @property
    def node_share(self) -> float:
        """Share of the weights that the ranks of a node store together: whole stages, or shards of one."""
        number = self.dims.pp
        stage = self.size // number
        stages = min(number, max(1, self.per_node // stage))
        return stages / number * min(1.0, number * min(self.per_node, stage) / self.shards)

    def gathered_adapters(self, size: int) -> Traffic:
        """Return the traffic of gathering adapters of ``size`` bytes: every rank receives what it merges.

        Without ZeRO's shards it has that itself. Tensor-parallel ranks split one of the two matrices of an adapter.
        """
        if self.shards == self.replica:
            return Traffic(0, 0, 0)
        merged = ceil(size * (1 + 1 / self.dims.tp) / 2 / self.dims.pp)
        return Traffic(merged, merged if self.node_share < 1 else 0)


@lru_cache(maxsize=4096)
def _first_equal(side: MeshSide) -> MeshSide:
    """Return the first side that equals ``side``, so that tables with sides as keys need not compare them."""
    return side


def lacks_rows(writer: MeshSide, reader: MeshSide, relation: Relation) -> bool:
    """Whether a rank of the reader needs rows that it has not written itself."""
    if relation == "same" and writer.dims.pp == reader.dims.pp == 1:
        return writer.replica % reader.replica != 0
    if relation == "same":
        return writer.dp > 1 and writer.of_rows.dims != reader.of_rows.dims
    return relation == "disjoint" or reader.size > writer.size or writer.dp > 1


def rows_traffic(size: int, writer: MeshSide, reader: MeshSide, relation: Relation, several_nodes: bool) -> Traffic:
    """Return the traffic of ``size`` bytes of rows. Every rank is counted as receiving all rows of its replica."""
    if not lacks_rows(writer, reader, relation):
        return Traffic(0, 0, 0)
    received, sent = -(-size // reader.dp), -(-size * reader.replica // writer.dp)
    messages = max(-(-writer.dp // reader.dp), -(-reader.size // writer.dp))
    if several_nodes and (relation == "disjoint" or max(writer.size, reader.size) > writer.per_node):
        return Traffic(0, max(received * reader.per_node, sent * min(writer.per_node, writer.dp)), messages)
    return Traffic(max(received, sent), 0, messages)


@dataclass(frozen=True)
class SyncWeights:
    """Weights of one Sync.

    part:         bytes on one rank of the destination
    adapters:     bytes of adapters that the source's ranks gather where they have shards of them
    num_buckets:  messages to each rank of the destination
    num_tensors:  weight tensors
    overlaps:     whether it overlaps other work
    """

    part: int
    adapters: int
    num_buckets: int
    num_tensors: int
    overlaps: bool = False


def sync_traffic(
    weights: SyncWeights, source: MeshSide, destination: MeshSide, relation: Relation, several_nodes: bool
) -> Traffic:
    """Return the traffic of a weight sync, which ranks of the source send in equal shares.

    On the same ranks each has its own shard already. To each node everything that it lacks crosses once; from there it
    goes from node to node in chains, unless the sync overlaps other work: then the source sends to all.
    """
    lacking = _lacking(source, destination) if relation == "same" else 1.0
    if not weights.part or not lacking:
        return Traffic(0, 0, 0)
    own = source.node_share
    stores = min(destination.per_node, max(destination.parts, destination.shards))
    replicas = destination.per_node // stores
    if relation == "same":
        served = 1.0
        # a node with half of the weights sends these; with less it also sends on what it receives from others
        across = stores * (1 - own if own >= 0.5 else 1.0)
    else:
        served = destination.size / source.size
        across = stores * (max(1.0, destination.nodes / source.nodes) if weights.overlaps else 1.0)
    messages = weights.num_buckets * max(ceil(served), source.shards)
    if several_nodes and (relation != "same" or own < 1):
        within = lacking * (replicas - 1) / replicas
        return Traffic(ceil(weights.part * within), ceil(weights.part * across), messages)
    return Traffic(ceil(weights.part * lacking * max(1.0, served)), 0, messages)


def _lacking(source: MeshSide, destination: MeshSide) -> float:
    """Return the share of its part that a rank of the destination has not as a rank of the source, at most."""
    if source.shards == source.parts and source.dims.tp == destination.dims.tp:
        return 1 - 1 / source.dims.pp
    is_elsewhere = source.shards == source.parts and min(source.dims.tp, destination.dims.tp) > 1
    return 1.0 if is_elsewhere else 1 - 1 / source.shards


@dataclass(frozen=True)
class ModelLink:
    """Two placed models and the links between them.

    source:         layout of the sending model
    destination:    layout of the receiving model
    relation:       how their ranks relate
    links:          bandwidths of the slowest class among them
    several_nodes:  whether the cluster has more than one node
    """

    source: MeshSide
    destination: MeshSide
    relation: Relation
    links: Links
    several_nodes: bool

    def rows_cost(self, costs: CostModel, size: int) -> Cost:
        """Return the time of ``size`` bytes: all rows that the destination reads of what the source wrote."""
        if not lacks_rows(self.source, self.destination, self.relation):
            return Cost()
        traffic = rows_traffic(size, self.source, self.destination, self.relation, self.several_nodes)
        primitive: Primitive = "point_to_point" if self.relation == "disjoint" else "all_to_all"
        return costs.move(primitive, traffic, self.links)

    def sync_cost(self, costs: CostModel, weights: SyncWeights) -> Cost:
        """Return the time of one weight sync."""
        traffic = sync_traffic(weights, self.source, self.destination, self.relation, self.several_nodes)
        links = self.links.of_ports(min(self.source.per_node, self.destination.per_node))
        return costs.sync(traffic, self.source.gathered_adapters(weights.adapters), weights.num_tensors, links)
