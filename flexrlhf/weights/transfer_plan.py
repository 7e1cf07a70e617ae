"""Transfers as data: regions of tensors in messages, and messages in buckets, in the order in which they are sent.

Between nodes weights go to each once, in pieces to different ranks there, which send them on. Receiving nodes form
chains, each fed by another node of the source where there are several: every node then sends what it has received once,
however many nodes there are. Few lots pass a long chain slowly, so they go through more and shorter ones, which the
source feeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import ceil, gcd, sqrt

from flexrlhf.weights.boxes import Box, box_elements
from flexrlhf.weights.parameters import ParameterName


@dataclass(frozen=True)
class Region:
    """A box of the tensor ``name``."""

    name: str
    box: Box

    @cached_property
    def num_elements(self) -> int:
        return box_elements(self.box)

    @property
    def is_large(self) -> bool:
        """Whether it travels by itself."""
        return self.num_elements >= LARGE


Regions = tuple[Region, ...]
LARGE = 2**16
"""Elements from which on a region travels by itself."""


def count(regions: Sequence[Region]) -> int:
    """Return the number of elements in ``regions``."""
    return sum(region.num_elements for region in regions)


@dataclass(frozen=True)
class WeightMessage:
    """Elements that one rank sends to others, which all store the same of them.

    source:        rank that sends.
    destinations:  ranks that receive.
    regions:       in the order in which they are sent, each region row-major.
    is_sent_on:    whether the sender has received it in an earlier bucket: it is in its part of the copy.
    """

    source: int
    destinations: tuple[int, ...]
    regions: Regions
    is_sent_on: bool = False

    @cached_property
    def num_elements(self) -> int:
        return count(self.regions)

    @property
    def vectors(self) -> tuple[Regions, ...]:
        """Regions that are sent as one vector: each large one alone, so that it need not be packed, biases of routers,
        which have a type of their own, and all others."""
        large = [(region,) for region in self.regions if region.is_large]
        small = [region for region in self.regions if not region.is_large]
        biases = tuple(region for region in small if ParameterName(region.name).is_router_bias)
        others = tuple(region for region in small if not ParameterName(region.name).is_router_bias)
        return tuple(filter(None, (*large, biases, others)))


@dataclass(frozen=True)
class Bucket:
    """Elements that are moved together.

    messages:  between ranks.
    stays:     by rank, regions that it copies from its own part of the source.
    """

    messages: tuple[WeightMessage, ...]
    stays: Mapping[int, Regions]

    @property
    def sent(self) -> Mapping[int, int]:
        """Elements that each rank packs, once for all receivers."""
        found: dict[int, int] = defaultdict(int)
        for message in self.messages:
            found[message.source] += message.num_elements
        return found

    @property
    def received(self) -> Mapping[int, int]:
        """Elements that arrive on each rank."""
        found: dict[int, int] = defaultdict(int)
        for message in self.messages:
            for rank in message.destinations:
                found[rank] += message.num_elements
        return found


@dataclass(frozen=True)
class TransferPlan:
    """Transfers in the order in which they are made."""

    buckets: tuple[Bucket, ...]

    @property
    def messages(self) -> Iterator[WeightMessage]:
        """Messages of all buckets."""
        return (message for bucket in self.buckets for message in bucket.messages)

    @property
    def links(self) -> Mapping[tuple[int, int], int]:
        """Elements that cross from one rank to another, by (source, destination)."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for message in self.messages:
            for destination in message.destinations:
                found[message.source, destination] += message.num_elements
        return dict(found)

    @property
    def received(self) -> Mapping[int, int]:
        """Elements that each rank receives from others."""
        found: dict[int, int] = defaultdict(int)
        for (_, destination), elements in self.links.items():
            found[destination] += elements
        return dict(found)

    @property
    def buffers(self) -> Mapping[int, int]:
        """Elements of the buffers of each rank: as large as the bucket in which it sends most, and receives most."""
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for bucket in self.buckets:
            for most, sizes in ((sent, bucket.sent), (received, bucket.received)):
                for rank, size in sizes.items():
                    most[rank] = max(most[rank], size)
        return {rank: sent[rank] + received[rank] for rank in sent | received}

    @property
    def largest_buffers(self) -> int:
        """Most elements that the buffers of one rank have."""
        return max(self.buffers.values(), default=0)


@dataclass(frozen=True)
class Hop:
    """One message of the way.

    stage:      number of messages before it on its way.
    piece:      number of the piece that is sent.
    senders:    ranks that have it, of which one sends, each in turn.
    receivers:  ranks that it is sent to.
    """

    stage: int
    piece: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


Way = tuple[Hop, ...]
"""Messages that bring pieces of equal size to all receivers."""


@dataclass(frozen=True)
class Chain:
    """Way of one piece along nodes, which send it on in turn.

    piece:    its number.
    place:    number of the rank of each node at which it arrives.
    senders:  ranks that have it, of which one sends to the first node, each in turn.
    nodes:    ranks of each node that need it.
    """

    piece: int
    place: int
    senders: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]

    @property
    def arrivals(self) -> list[int]:
        """Ranks of the nodes at which the piece arrives."""
        return [ranks[self.place % len(ranks)] for ranks in self.nodes]

    @property
    def hops(self) -> Iterator[Hop]:
        """Messages, in order."""
        receivers = self.arrivals
        yield Hop(0, self.piece, self.senders, (receivers[0],))
        for stage, (ranks, receiver) in enumerate(zip(self.nodes, receivers, strict=True), 1):
            others = (*(rank for rank in ranks if rank != receiver), *receivers[stage : stage + 1])
            if others:
                yield Hop(stage, self.piece, (receiver,), others)


def chains_to(
    sources: Sequence[tuple[int, ...]], receivers: Sequence[tuple[int, ...]], num_lots: int | None, pieces: range
) -> Iterator[Chain]:
    """Yield the ways from ranks that have the same to ranks of other nodes that need it, both by node.

    num_lots:  lots that go this way, one after the other; None: no node sends on to another node.
    pieces:    in which it is sent, numbered among all that cross at a time: the next one arrives at the next rank.
    """
    chains = min(len(receivers), len(sources) * _fan_out(ceil(len(receivers) / len(sources)), num_lots))
    # one of each node, then the next of each
    order = [rank for turn in zip_longest(*sources) for rank in turn if rank is not None]
    step = len(pieces) * chains
    turns = len(order) // gcd(step, len(order))
    for chain in range(chains):
        for piece, place in enumerate(pieces):
            first = chain + piece * chains
            senders = tuple(order[(first + turn * step) % len(order)] for turn in range(turns))
            yield Chain(piece, place, senders, tuple(receivers[chain::chains]))


def _fan_out(longest: int, num_lots: int | None) -> int:
    """Return the chains that one node of the source feeds. ``longest``: nodes of one chain if that is all.

    With f chains each lot takes f times as long, and the last one has to pass longest / f nodes, two lots behind at
    each: f * num_lots + 2 * longest / f is least here.
    """
    return longest if num_lots is None else min(longest, max(1, round(sqrt(2 * longest / num_lots))))
