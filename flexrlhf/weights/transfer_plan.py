"""Transfers as data: regions of tensors in messages, and messages in buckets, in the order in which they are sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flexrlhf.weights.boxes import Box, box_elements


@dataclass(frozen=True)
class Region:
    """A box of the tensor ``name``."""

    name: str
    box: Box

    @cached_property
    def num_elements(self) -> int:
        return box_elements(self.box)


Regions = tuple[Region, ...]
LARGE = 2**16
"""Elements from which on a region travels by itself."""
NUM_BUCKETS = 3
"""Buckets that exist at a time: two in flight while a third is packed."""


def count(regions: Sequence[Region]) -> int:
    """Return the number of elements in ``regions``."""
    return sum(region.num_elements for region in regions)


@dataclass(frozen=True)
class WeightMessage:
    """Elements that one rank sends to others, which all store the same of them.

    source:        rank that sends.
    destinations:  ranks that receive.
    regions:       what is sent, in this order, each region row-major.
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
        """Regions that are sent as one vector: each large one alone, so that it need not be packed, and all others."""
        large = [(region,) for region in self.regions if region.num_elements >= LARGE]
        small = tuple(region for region in self.regions if region.num_elements < LARGE)
        return (*large, small) if small else tuple(large)


@dataclass(frozen=True)
class Bucket:
    """Elements that are moved together.

    messages:  between ranks.
    stays:     by rank, what it copies from its own part of the source.
    """

    messages: tuple[WeightMessage, ...]
    stays: Mapping[int, Regions]

    @property
    def sent(self) -> Mapping[int, int]:
        """Elements that each rank packs: those for several others once."""
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
        """Elements of the buffers of each rank: those of the bucket in which it sends most, and receives most."""
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
