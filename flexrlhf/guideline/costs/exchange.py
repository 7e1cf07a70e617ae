"""Seconds of rows and weights between two placed models, from their layouts and not from their ranks.

The simulator prices the Moves and Syncs of a plan with it, the search those of a candidate whose rows are not routed
yet: both get the same seconds. Bytes are those of the busiest rank; on a cluster of several nodes they are counted as
crossing between nodes unless both models fit the same devices of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from flexrlhf.guideline.costs.cost_model import Cost, CostModel, Links, Traffic
from flexrlhf.placement.routes import Primitive, Relation


@dataclass(frozen=True)
class MeshSide:
    """One end of an exchange: how a placed model is laid out.

    size:      devices
    per_node:  devices in a node
    dp:        replicas
    tp:        tensor-parallel ranks of a replica
    zero:      ZeRO stage
    shards:    ranks that gather their shards of a tensor before weights are sent; 1: each has whole tensors
    pp:        pipeline stages of a replica
    """

    size: int
    per_node: int
    dp: int
    tp: int = 1
    zero: int = 0
    shards: int = 1
    pp: int = 1

    @property
    def replica(self) -> int:
        """Ranks of a replica, which all have its rows."""
        return self.tp * self.pp

    @property
    def nodes(self) -> int:
        """Nodes with devices of it."""
        return ceil(self.size / self.per_node)

    def gathered(self, whole: int) -> Traffic:
        """Return the traffic of gathering ``whole`` bytes of weights: every rank receives what the others have."""
        if self.shards == 1:
            return Traffic(0, 0, 0)
        return Traffic(whole, whole if self.shards > self.per_node else 0)


def lacks_rows(writer: MeshSide, reader: MeshSide, relation: Relation) -> bool:
    """Whether a rank of the reader needs rows that it has not written itself."""
    if relation == "same" and writer.pp == reader.pp == 1:
        return writer.tp % reader.tp != 0
    if relation == "same":
        return writer.dp > 1 and (writer.tp, writer.pp) != (reader.tp, reader.pp)
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
    if not weights.part or (relation == "same" and source.shards == 1):
        return Traffic(0, 0, 0)
    held = min(1.0, source.per_node / source.shards)
    stores = min(destination.per_node, max(destination.replica, destination.shards))
    beside = destination.per_node // stores
    if relation == "same":
        served, lacking, across = 1.0, 1 - 1 / source.shards, stores * (1 - held)
    else:
        served, lacking = destination.size / source.size, 1.0
        across = stores * (max(1.0, destination.nodes / source.nodes) if weights.overlaps else 1.0)
    messages = weights.num_buckets * max(ceil(served), source.shards)
    if several_nodes and (relation != "same" or source.shards > source.per_node):
        within = lacking * (beside - 1) / beside
        return Traffic(ceil(weights.part * within), ceil(weights.part * across), messages)
    return Traffic(ceil(weights.part * lacking * max(1.0, served)), 0, messages)


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
        """Return the seconds of ``size`` bytes: all rows that the destination reads of what the source wrote."""
        if not lacks_rows(self.source, self.destination, self.relation):
            return Cost()
        traffic = rows_traffic(size, self.source, self.destination, self.relation, self.several_nodes)
        primitive: Primitive = "point_to_point" if self.relation == "disjoint" else "all_to_all"
        return costs.move(primitive, traffic, self.links)

    def sync_cost(self, costs: CostModel, weights: SyncWeights) -> Cost:
        """Return the seconds of one weight sync."""
        traffic = sync_traffic(weights, self.source, self.destination, self.relation, self.several_nodes)
        return costs.sync(traffic, self.source.gathered(weights.adapters), weights.num_tensors, self.links)
