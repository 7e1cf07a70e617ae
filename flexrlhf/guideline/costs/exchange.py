"""What rows and weights between two placed models cost, from how both lie and not from where.

The simulator prices the Moves and Syncs of a plan so, the search those of a candidate whose rows nobody has routed yet:
both get the same seconds. Bytes are those of the busiest rank; on a cluster of several nodes they are taken to cross
between nodes unless both sides fit the same devices of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexrlhf.guideline.costs.cost_model import Cost, CostModel, Links, Traffic
from flexrlhf.placement.relation import Relation
from flexrlhf.placement.routes import Primitive


@dataclass(frozen=True)
class Side:
    """How one placed model lies: ``size`` devices, ``per_node`` in a node, ``dp`` replicas of ``tp`` ranks, ZeRO stage.

    ``cut``: ranks that put their shards of a tensor together before weights leave; 1: each has it whole.
    """

    size: int
    per_node: int
    dp: int
    tp: int = 1
    zero: int = 0
    cut: int = 1

    def gathered(self, whole: int) -> Traffic:
        """What putting ``whole`` bytes of weights together takes: every rank receives what the others have."""
        if self.cut == 1:
            return Traffic(0, 0, 0)
        return Traffic(whole, whole if self.cut > self.per_node else 0)


def lacks_rows(writer: Side, reader: Side, relation: Relation) -> bool:
    """Whether a rank of the reader needs rows that it has not written itself."""
    if relation == "same":
        return writer.tp % reader.tp != 0
    return relation == "disjoint" or reader.size > writer.size or writer.dp > 1


def rows_traffic(size: int, writer: Side, reader: Side, relation: Relation, several_nodes: bool) -> Traffic:
    """``size``: bytes of all rows. A rank is counted to need all that its replica reads."""
    if not lacks_rows(writer, reader, relation):
        return Traffic(0, 0, 0)
    received, sent = -(-size // reader.dp), -(-size * reader.tp // writer.dp)
    messages = max(-(-writer.dp // reader.dp), -(-reader.size // writer.dp))
    if several_nodes and (relation == "disjoint" or max(writer.size, reader.size) > writer.per_node):
        return Traffic(0, max(received * reader.per_node, sent * min(writer.per_node, writer.dp)), messages)
    return Traffic(max(received, sent), 0, messages)


def sync_traffic(
    part: int, num_buckets: int, source: Side, destination: Side, relation: Relation, several_nodes: bool
) -> Traffic:
    """``part``: bytes of weights that a rank of the destination holds; each comes from one rank of the source."""
    if relation == "same":
        return Traffic(0, 0, 0)
    served = -(-destination.size // source.size)
    if several_nodes:
        across = part * max(destination.per_node, served * min(source.per_node, destination.size))
        return Traffic(0, across, num_buckets * served)
    return Traffic(part * served, 0, num_buckets * served)


@dataclass(frozen=True)
class Between:
    """Two placed models and the wires between them. ``several_nodes``: whether the cluster has more than one."""

    source: Side
    destination: Side
    relation: Relation
    links: Links
    several_nodes: bool

    def rows_cost(self, costs: CostModel, size: int) -> Cost:
        """``size``: bytes of all rows that the destination reads of what the source wrote."""
        if not lacks_rows(self.source, self.destination, self.relation):
            return Cost()
        traffic = rows_traffic(size, self.source, self.destination, self.relation, self.several_nodes)
        primitive: Primitive = "point_to_point" if self.relation == "disjoint" else "all_to_all"
        return costs.move(primitive, traffic, self.links)

    def sync_cost(self, costs: CostModel, weights: Weights) -> Cost:
        traffic = sync_traffic(
            weights.part, weights.num_buckets, self.source, self.destination, self.relation, self.several_nodes
        )
        return costs.sync(traffic, self.source.gathered(weights.whole), weights.num_tensors, self.links)


@dataclass(frozen=True)
class Weights:
    """What a Sync sends. ``part``: bytes on one rank of the destination. ``whole``: bytes that the source's ranks put
    together where it is cut."""

    part: int
    whole: int
    num_buckets: int
    num_tensors: int
