"""Transfers of weights between any two layouts: which rank sends which elements to whom, planned before a run.

A source and a destination are given by the part of each tensor that each of their ranks stores, however it is sharded:
split by tensor parallelism, by rows, flat, by pipeline stage, or not at all. What a destination rank stores as a source
rank already stays where it is; everything else is sent once, from a rank of the same node where there is one, and
replicas of the source take turns. Buckets are sized so that the buffers of no rank are above a limit.

It is the parameter reallocation of ReaL (Mei et al. 2024), and with destination ranks in the order of
``placement/generation_order.py`` the resharding of HybridFlow's 3D-HybridEngine (Sheng et al. 2024, sec. 5).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from flexrlhf.weights.boxes import Box, box_elements, boxes_of, intersection, slabs
from flexrlhf.weights.shards import Part, whole

Holdings = Mapping[int, Mapping[str, Part]]
"""Part of each tensor on each rank, by rank and name; a tensor that a rank stores nothing of may be absent."""
NodeOf = Callable[[int], int]


@dataclass(frozen=True)
class Region:
    """A box of the tensor ``name``."""

    name: str
    box: Box

    @property
    def num_elements(self) -> int:
        return box_elements(self.box)


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
    regions:       what is sent, in this order, each region row-major.
    """

    source: int
    destinations: tuple[int, ...]
    regions: Regions

    @property
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


def plan_transfers(source: Holdings, destination: Holdings, most: int, node_of: NodeOf | None = None) -> TransferPlan:
    """Return the transfers that give each rank of ``destination`` its parts.

    most:     elements that the buffers of a rank may have, those of its largest messages to and from others.
    node_of:  node of a rank; None: all are on one.

    Raises KeyError for a tensor that no rank of ``source`` stores.
    """
    assert most > 0, "a bucket of nothing"
    planner = _Planner(source, destination, node_of or (lambda rank: 0))
    size = planner.num_elements
    while True:
        plan = planner.plan(size)
        largest = plan.largest_buffers
        # of one element, which a rank may send to several others by messages of their own
        if largest <= most or size == 1:
            return plan
        size = max(1, min(size - 1, size * most // largest))


def mean_links(
    source: Holdings, destination: Holdings, node_of: NodeOf | None = None
) -> Mapping[tuple[int, int], float]:
    """Return the elements that cross from one rank to another, by (source, destination), whatever the buckets.

    Replicas of the source are counted with equal shares, which their turns come to over many buckets.
    """
    return _Planner(source, destination, node_of or (lambda rank: 0)).mean_links()


@dataclass(frozen=True)
class _Group:
    """Destination ranks that store the same part of every tensor, as destination and as source.

    ranks:  of one node, where source ranks are on it, too.
    node:   None: of any, none of which has source ranks.
    """

    ranks: tuple[int, ...]
    node: int | None


@dataclass(frozen=True)
class _Owner:
    """A part of a tensor on the source, and the ranks that store it."""

    part: Part
    ranks: tuple[int, ...]


Owners = tuple[_Owner, ...]


class _Planner:
    """Transfers between two layouts, for buckets of any size."""

    def __init__(self, source: Holdings, destination: Holdings, node_of: NodeOf) -> None:
        self._source, self._destination, self._node_of = source, destination, node_of
        self._shapes = {name: part.shape for parts in destination.values() for name, part in parts.items()}
        # layers are alike: what is found for one is found for all
        alike: dict[Owners, Owners] = {}
        self._owners = {name: alike.setdefault(each := _owners(source, name), each) for name in self._shapes}
        self._found: dict[tuple[int, Part, Box], tuple[tuple[_Owner, tuple[Box, ...]], ...]] = {}
        self._groups = self._grouped()

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(prod(shape) for shape in self._shapes.values())

    def _grouped(self) -> tuple[_Group, ...]:
        near = {self._node_of(rank) for rank in self._source}
        alike: dict[object, list[int]] = defaultdict(list)
        nodes: dict[object, int | None] = {}
        for rank, parts in self._destination.items():
            own, node = self._source.get(rank, {}), self._node_of(rank)
            key = (tuple((parts.get(name), own.get(name)) for name in self._shapes), node if node in near else None)
            alike[key].append(rank)
            nodes[key] = key[1]
        return tuple(_Group(tuple(ranks), nodes[key]) for key, ranks in alike.items())

    def plan(self, size: int) -> TransferPlan:
        """Return the transfers in buckets of at most ``size`` elements of whole tensors."""
        return TransferPlan(tuple(self._bucket(turn, regions) for turn, regions in enumerate(self._cut(size))))

    def _cut(self, size: int) -> Iterator[list[Region]]:
        """Yield the elements of all tensors in lots of at most ``size``."""
        lot, left = list[Region](), size
        for name in sorted(self._shapes):
            for box in slabs(self._shapes[name], size):
                elements = box_elements(box)
                if lot and elements > left:
                    yield lot
                    lot, left = [], size
                lot.append(Region(name, box))
                left -= elements
        if lot:
            yield lot

    def _bucket(self, turn: int, regions: Sequence[Region]) -> Bucket:
        contents: dict[tuple[int, tuple[int, ...]], list[Region]] = defaultdict(list)
        stays: dict[int, list[Region]] = defaultdict(list)
        for group in self._groups:
            parts = self._destination[group.ranks[0]]
            for region in regions:
                part = parts.get(region.name)
                if part is not None:
                    for owner, boxes in self._overlaps(region, part):
                        common = [Region(region.name, box) for box in boxes]
                        self._assign(group, owner, common, turn, contents, stays)
        # ranks that need the same of a rank share its buffer
        receivers: dict[tuple[int, Regions], list[int]] = defaultdict(list)
        for (source, ranks), sent in contents.items():
            receivers[source, tuple(sent)] += ranks
        messages = tuple(WeightMessage(source, tuple(ranks), sent) for (source, sent), ranks in receivers.items())
        return Bucket(messages, {rank: tuple(kept) for rank, kept in stays.items()})

    def mean_links(self) -> Mapping[tuple[int, int], float]:
        """Return the elements of each link, with equal shares of the source's replicas."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        for group in self._groups:
            parts = self._destination[group.ranks[0]]
            # of tensors that are alike one is looked at
            alike = Counter((id(self._owners[name]), part) for name, part in parts.items())
            examples = {(id(self._owners[name]), part): name for name, part in parts.items()}
            for key, number in alike.items():
                name, part = examples[key], key[1]
                for owner, boxes in self._overlaps(Region(name, whole(part.shape).box), part):
                    near = () if group.ranks[0] in owner.ranks else self._near(group, owner)
                    for link in product(near, group.ranks):
                        found[link] += number * sum(map(box_elements, boxes)) / len(near)
        return dict(found)

    def _near(self, group: _Group, owner: _Owner) -> tuple[int, ...]:
        """Return the ranks of ``owner`` that send to ``group``: those on its node, if any."""
        near = tuple(rank for rank in owner.ranks if self._node_of(rank) == group.node)
        return near or owner.ranks

    def _overlaps(self, region: Region, part: Part) -> tuple[tuple[_Owner, tuple[Box, ...]], ...]:
        """Return the owners of what ``part`` has of ``region``, and the boxes that each has of it."""
        owners = self._owners[region.name]
        key = (id(owners), part, region.box)
        if key not in self._found:
            needed = [box for each in boxes_of(part) if (box := intersection(each, region.box)) is not None]
            found = ((owner, tuple(_within(owner.part, needed))) for owner in owners)
            self._found[key] = tuple((owner, boxes) for owner, boxes in found if boxes)
        return self._found[key]

    def _assign(
        self,
        group: _Group,
        owner: _Owner,
        common: list[Region],
        turn: int,
        contents: dict[tuple[int, tuple[int, ...]], list[Region]],
        stays: dict[int, list[Region]],
    ) -> None:
        """Add ``common``, which ``group`` needs and ``owner`` has, to messages, or to what stays."""
        if group.ranks[0] in owner.ranks:
            for rank in group.ranks:
                stays[rank] += common
            return
        near = self._near(group, owner)
        for place, source in enumerate(near):
            # replicas of the source take turns, over the ranks of a group and over buckets
            ranks = group.ranks[(place + turn) % len(near) :: len(near)]
            if ranks:
                contents[source, ranks] += common


@lru_cache(maxsize=4096)
def overlap(first: Part, second: Part) -> int:
    """Return the number of elements that two parts of a tensor have in common."""
    return sum(map(box_elements, _within(first, boxes_of(second))))


def _owners(source: Holdings, name: str) -> Owners:
    """Return the different parts of a tensor that ranks store, which are disjoint, and the ranks that store each."""
    found: dict[Part, list[int]] = defaultdict(list)
    for rank, parts in source.items():
        if name in parts and parts[name].num_elements:
            found[parts[name]].append(rank)
    if not found:
        raise KeyError(f"no rank of the source stores {name}")
    return tuple(_Owner(part, tuple(ranks)) for part, ranks in found.items())


def _within(part: Part, boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield what ``part`` has of ``boxes``."""
    for first in boxes_of(part):
        for second in boxes:
            common = intersection(first, second)
            if common is not None:
                yield common
