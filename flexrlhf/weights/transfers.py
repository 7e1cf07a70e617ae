"""Transfers of weights between any two layouts: which rank sends which elements to whom, planned before a run.

A source and a destination are given by the part of each tensor that each of their ranks stores, however it is sharded:
split by tensor parallelism, by rows, flat, by pipeline stage, or not at all. What a destination rank stores as a source
rank already stays where it is; everything else is sent once, from a rank of the same node where there is one, and
replicas of the source take turns. What no source rank of a node has crosses to it once, and is sent on
there. Buckets are sized so that the buffers of no rank are above a limit.

It is the parameter reallocation of ReaL (Mei et al. 2024), and with destination ranks in the order of
``placement/generation_order.py`` the resharding of HybridFlow's 3D-HybridEngine (Sheng et al. 2024, sec. 5).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, lcm, prod

from flexrlhf.config.spec import SyncSpec
from flexrlhf.weights.boxes import Box, box_elements, boxes_of, cut_rows, intersection, num_rows, slabs
from flexrlhf.weights.shards import Part
from flexrlhf.weights.transfer_plan import (
    Bucket,
    Chain,
    Region,
    Regions,
    TransferPlan,
    Way,
    WeightMessage,
    chains_to,
    count,
)

Holdings = Mapping[int, Mapping[str, Part]]
"""Part of each tensor on each rank, by rank and name; a tensor that a rank stores nothing of may be absent."""
NodeOf = Callable[[int], int]
EVEN = 4
"""Pieces for each rank of a node from which on it matters little that some ranks receive one more."""


def plan_transfers(
    source: Holdings, destination: Holdings, most: int, node_of: NodeOf | None = None, in_background: bool = False
) -> TransferPlan:
    """Return the transfers that give each rank of ``destination`` its parts.

    most:           elements that a rank's buffers of its largest messages, to and from others, may have.
    node_of:        node of a rank; None: all are on one.
    in_background:  whether ranks compute meanwhile: nothing is sent on before all else has arrived, and only inside
                    nodes.

    Raises KeyError for a tensor that no rank of ``source`` stores.
    """
    planner = _Planner(source, destination, most, node_of or (lambda rank: 0), in_background)
    size = planner.num_elements
    while True:
        lots = list(planner.lots(size))
        plan = planner.plan(lots)
        largest, unchanged = plan.largest_buffers, max(map(count, lots), default=1)
        # of one element, which a rank may send to several others by messages of their own
        if largest <= most or size == 1:
            return plan
        # the lots of sizes that the largest lot fits are the same
        while size >= max(2, unchanged):
            size = max(1, min(size - 1, size * most // largest))


def mean_links(
    source: Holdings, destination: Holdings, most: int, node_of: NodeOf | None = None, in_background: bool = False
) -> Mapping[tuple[int, int], float]:
    """Return the elements that cross from one rank to another in ``plan_transfers``, by (source, destination).

    Replicas of the source are counted with equal shares, which their turns come to over many buckets.
    """
    return _Planner(source, destination, most, node_of or (lambda rank: 0), in_background).mean_links()


@dataclass(frozen=True)
class _Group:
    """Destination ranks of ``node`` that store the same part of every tensor, as destination and as source."""

    ranks: tuple[int, ...]
    node: int


@dataclass(frozen=True)
class _Owner:
    """A part of a tensor on the source, and the ranks that store it."""

    part: Part
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _NeededBoxes:
    """Boxes of a tensor that a group needs, and the ranks of the source that have them.

    number:  of these boxes and ranks, whatever the tensor.
    ranks:   that have them.
    boxes:   of the tensor.
    nodes:   the ranks by node.
    """

    number: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    nodes: Mapping[int, tuple[int, ...]]

    def regions(self, name: str) -> list[Region]:
        """Return the boxes of tensor ``name``."""
        return [Region(name, box) for box in self.boxes]


Owners = tuple[_Owner, ...]
Contents = Mapping[tuple[int, int, tuple[int, ...]], list[Region]]
"""What is sent, by stage, sender and receivers."""
_Near = tuple[_Group, tuple[int, ...], list[Region]]
"""A group, the ranks of its node that have what it needs, and that."""
Receivers = tuple[tuple[int, ...], ...]
"""Ranks that need the same, by node."""
_Far = tuple[tuple[int, ...], Receivers]
"""Ranks that have the same, and its receivers."""


class _Planner:
    """Transfers between two layouts, for buckets of any size."""

    def __init__(
        self, source: Holdings, destination: Holdings, most: int, node_of: NodeOf, in_background: bool
    ) -> None:
        assert most > 0, "a bucket of nothing"
        self._source, self._destination, self._node_of = source, destination, node_of
        self._most, self._in_background = most, in_background
        self._shapes = {name: part.shape for parts in destination.values() for name, part in parts.items()}
        # layers are alike: what is found for one is found for all
        self._alike = _alike_tensors(source, destination, self._shapes)
        firsts = [names[0] for names in self._alike]
        owners = dict(zip(firsts, _all_owners(source, firsts), strict=True))
        self._owners = {name: owners[names[0]] for names in self._alike for name in names}
        self._found: dict[tuple[int, Part, Box], tuple[_NeededBoxes, ...]] = {}
        self._numbers: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
        self._ways: dict[tuple[tuple[int, ...], Receivers, range], Way] = {}
        self._nodes: dict[tuple[int, ...], Mapping[int, tuple[int, ...]]] = {}
        self._groups = self._grouped()

    @cached_property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(prod(shape) for shape in self._shapes.values())

    def _grouped(self) -> tuple[_Group, ...]:
        numbers: dict[object, int] = {}
        number_of: dict[int, int] = {}
        for ranks in alike(self._destination, self._source):
            parts, own = self._destination[ranks[0]], self._source.get(ranks[0], {})
            both = tuple((parts.get(names[0]), own.get(names[0])) for names in self._alike)
            number_of |= dict.fromkeys(ranks, numbers.setdefault(both, len(numbers)))
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank in self._destination:
            groups[number_of[rank], self._node_of(rank)].append(rank)
        return tuple(_Group(tuple(ranks), node) for (_, node), ranks in groups.items())

    def plan(self, lots: Sequence[Sequence[Region]]) -> TransferPlan:
        """Return the transfers of ``lots``.

        A lot is sent on as many buckets later as have arrived by then.
        """
        later = max(SyncSpec.NUM_BUCKETS - 1, len(lots) if self._in_background else 0)
        messages: dict[int, list[WeightMessage]] = defaultdict(list)
        stays: dict[int, Mapping[int, Regions]] = {}
        for turn, lot in enumerate(lots):
            contents, stays[turn] = self._lot(turn, lot)
            # ranks that need the same of a rank share its buffer
            receivers: dict[tuple[int, int, Regions], list[int]] = defaultdict(list)
            for (stage, source, ranks), sent in contents.items():
                receivers[stage, source, tuple(sent)] += ranks
            for (stage, source, regions), each in receivers.items():
                messages[turn + later * stage].append(WeightMessage(source, tuple(each), regions, stage > 0))
        last = max((*messages, *stays), default=-1)
        return TransferPlan(tuple(Bucket(tuple(messages[turn]), stays.get(turn, {})) for turn in range(last + 1)))

    def lots(self, size: int) -> Iterator[list[Region]]:
        """Yield the elements of all tensors in lots of at most ``size``."""
        lot, left = list[Region](), size
        for name in sorted(self._shapes):
            for box in slabs(Part.whole(self._shapes[name]).box, size):
                elements = box_elements(box)
                if lot and elements > left:
                    yield lot
                    lot, left = [], size
                lot.append(Region(name, box))
                left -= elements
        if lot:
            yield lot

    def _lot(self, turn: int, regions: Sequence[Region]) -> tuple[Contents, Mapping[int, Regions]]:
        """Return the messages of a lot, and the regions that stay on each rank."""
        contents: dict[tuple[int, int, tuple[int, ...]], list[Region]] = defaultdict(list)
        stays: dict[int, list[Region]] = defaultdict(list)
        near, far = self._needs(regions)
        for group, sources, common in near:
            if group.ranks[0] in sources:
                for rank in group.ranks:
                    stays[rank] += common
                continue
            for place, source in enumerate(sources):
                # replicas of the source take turns, over the ranks of a group and over lots
                if ranks := group.ranks[(place + turn) % len(sources) :: len(sources)]:
                    contents[0, source, ranks] += common
        crossed: Counter[Receivers] = Counter(receivers for _, receivers in far)
        begun: Counter[Receivers] = Counter()
        for (sources, receivers), crossing in far.items():
            number = _num_pieces(receivers, crossed[receivers])
            way = self._way(sources, receivers, range(begun[receivers], begun[receivers] + number))
            begun[receivers] += number
            pieces = _pieces(crossing, number)
            for hop in way:
                if pieces[hop.piece]:
                    contents[hop.stage, hop.senders[turn % len(hop.senders)], hop.receivers] += pieces[hop.piece]
        return contents, {rank: tuple(kept) for rank, kept in stays.items()}

    def _needs(self, regions: Sequence[Region]) -> tuple[list[_Near], Mapping[_Far, list[Region]]]:
        """Return what groups need of ``regions``: with the ranks of their node that have it, and what no rank there
        has, which crosses to each node once.
        """
        near: list[_Near] = []
        pieces: dict[tuple[int, str], _NeededBoxes] = {}
        lacking: dict[tuple[int, str], dict[int, tuple[int, ...]]] = defaultdict(dict)
        for group in self._groups:
            parts, node = self._destination[group.ranks[0]], group.node
            for region in regions:
                part = parts.get(region.name)
                for piece in () if part is None else self._overlaps(region, part):
                    if there := piece.nodes.get(node, ()):
                        near.append((group, there, piece.regions(region.name)))
                    else:
                        key = piece.number, region.name
                        pieces[key], nodes = piece, lacking[key]
                        nodes[node] = (*nodes.get(node, ()), *group.ranks)
        far: dict[_Far, list[Region]] = defaultdict(list)
        for key, nodes in lacking.items():
            far[pieces[key].ranks, tuple(nodes.values())] += pieces[key].regions(key[1])
        return near, far

    def _way(self, sources: tuple[int, ...], receivers: Receivers, pieces: range) -> Way:
        """Return the way from ``sources``, which have the same, to ``receivers``."""
        key = sources, receivers, pieces
        if key not in self._ways:
            self._ways[key] = tuple(hop for each in self._chains(*key) for hop in each.hops)
        return self._ways[key]

    def _chains(self, sources: tuple[int, ...], receivers: Receivers, pieces: range) -> Iterator[Chain]:
        num_lots = None if self._in_background else ceil(self.num_elements / self._most)
        return chains_to([*self._by_node(sources).values()], receivers, num_lots, pieces)

    def _by_node(self, ranks: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        if ranks not in self._nodes:
            found: dict[int, tuple[int, ...]] = {}
            for rank in ranks:
                node = self._node_of(rank)
                found[node] = (*found.get(node, ()), rank)
            self._nodes[ranks] = found
        return self._nodes[ranks]

    def mean_links(self) -> Mapping[tuple[int, int], float]:
        """Return the elements of each link, with equal shares of the source's replicas."""
        found: dict[tuple[int, int], float] = defaultdict(float)
        chained: dict[Chain, float] = defaultdict(float)
        for names in self._alike:
            near, far = self._needs([Region(names[0], Part.whole(self._shapes[names[0]]).box)])
            for group, sources, common in near:
                if group.ranks[0] not in sources:
                    for link in product(sources, group.ranks):
                        found[link] += len(names) * count(common) / len(sources)
            for (sources, receivers), crossing in far.items():
                number = _num_pieces(receivers, 1)
                size = len(names) * count(crossing) / number
                for each in self._chains(sources, receivers, range(number)):
                    for sender in each.senders:
                        found[sender, each.arrivals[0]] += size / len(each.senders)
                    # whoever sends it, it is sent on alike
                    chained[replace(each, senders=())] += size
        for each, size in chained.items():
            for hop in each.hops:
                for link in product(hop.senders, hop.receivers):
                    found[link] += size
        return dict(found)

    def _overlaps(self, region: Region, part: Part) -> tuple[_NeededBoxes, ...]:
        """Return the pieces of the intersection of ``part`` and ``region``, by owner."""
        owners = self._owners[region.name]
        key = (id(owners), part, region.box)
        if key not in self._found:
            needed = [box for each in boxes_of(part) if (box := intersection(each, region.box)) is not None]
            pieces = []
            for owner in owners:
                if boxes := tuple(_within(owner.part, needed)):
                    number = self._numbers.setdefault((owner.ranks, boxes), len(self._numbers))
                    pieces.append(_NeededBoxes(number, owner.ranks, boxes, self._by_node(owner.ranks)))
            self._found[key] = tuple(pieces)
        return self._found[key]


def _num_pieces(receivers: Receivers, number: int) -> int:
    """Return the pieces of each of ``number`` lots that cross at a time, so that all ranks of a node receive alike."""
    widths = {len(ranks) for ranks in receivers}
    ranks = min(lcm(*widths), EVEN * max(widths))
    return ranks if number <= EVEN else -(-EVEN * max(widths) // number)


def _pieces(regions: Sequence[Region], number: int) -> list[list[Region]]:
    """Return ``regions`` in ``number`` pieces of about one size, between rows."""
    pieces: list[list[Region]] = [[] for _ in range(number)]
    total, done = count(regions), 0
    for region in regions:
        size, start = region.num_elements, 0
        rows, row = num_rows(region.box), size // num_rows(region.box)
        while start < rows:
            piece = (done + start * row) * number // total
            # up to the first row that begins in the next piece
            stop = min(rows, -(-(-(-total * (piece + 1) // number) - done) // row))
            is_whole = start == 0 and stop == rows
            pieces[piece].append(region if is_whole else Region(region.name, cut_rows(region.box, range(start, stop))))
            start = stop
        done += size
    return pieces


@lru_cache(maxsize=4096)
def overlap(first: Part, second: Part) -> int:
    """Return the number of elements that two parts of a tensor have in common."""
    return sum(map(box_elements, _within(first, boxes_of(second))))


def alike(holdings: Holdings, *others: Holdings) -> list[list[int]]:
    """Return the ranks of ``holdings`` in lists: all of a list share the mappings of their parts, in ``others`` too."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, parts in holdings.items():
        found[id(parts), tuple(id(other.get(rank)) for other in others)].append(rank)
    return list(found.values())


def _alike_tensors(source: Holdings, destination: Holdings, names: Iterable[str]) -> list[list[str]]:
    """Return ``names`` in lists: all ranks store equal parts of the tensors of a list."""
    stored = [each[ranks[0]] for each in (source, destination) for ranks in alike(each)]
    shared: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in names:
        shared[tuple(id(parts.get(name)) for parts in stored)].append(name)
    equal: dict[tuple[Part | None, ...], list[str]] = defaultdict(list)
    for members in shared.values():
        equal[tuple(parts.get(members[0]) for parts in stored)] += members
    return list(equal.values())


def _all_owners(source: Holdings, names: Iterable[str]) -> Iterator[Owners]:
    """Yield the different parts of each tensor that ranks store, which are disjoint, and the ranks that store each."""
    place = {rank: index for index, rank in enumerate(source)}
    kinds = [(source[ranks[0]], ranks) for ranks in alike(source)]
    for name in names:
        found: dict[Part, list[int]] = defaultdict(list)
        for parts, ranks in kinds:
            if name in parts and parts[name].num_elements:
                found[parts[name]] += ranks
        if not found:
            raise KeyError(f"no rank of the source stores {name}")
        yield tuple(_Owner(part, tuple(sorted(ranks, key=place.__getitem__))) for part, ranks in found.items())


def _within(part: Part, boxes: Sequence[Box]) -> Iterator[Box]:
    """Yield the intersections of ``part`` with ``boxes``."""
    for first in boxes_of(part):
        for second in boxes:
            common = intersection(first, second)
            if common is not None:
                yield common
