"""One rank's part in a Sync, planned once before the run: elements to send, to receive and to copy, in buckets.

Pure data; ``comm/sync.py`` executes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from flexrlhf.config.model_settings import DTYPE_BYTES, Dtype, LoraSpec
from flexrlhf.config.spec import SyncSpec
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shards import Part, Parts, named
from flexrlhf.weights.transfer_plan import Regions, TransferPlan, WeightMessage
from flexrlhf.weights.transfers import Holdings, NodeOf, alike, mean_links, overlap, plan_transfers


@dataclass(frozen=True)
class RankBucket:
    """One bucket on one rank.

    sends:     messages that it sends.
    receives:  messages that it receives.
    stays:     regions that it copies from its own part of the trained model.
    """

    sends: tuple[WeightMessage, ...]
    receives: tuple[WeightMessage, ...]
    stays: Regions

    @property
    def num_sent(self) -> int:
        """Elements of its messages."""
        return sum(message.num_elements for message in self.sends)

    @property
    def num_received(self) -> int:
        """Elements of the messages to it."""
        return sum(message.num_elements for message in self.receives)

    @property
    def sends_on(self) -> bool:
        """Whether some of it has arrived on a rank of the copy before; in the background all of it has, or none."""
        return any(message.is_sent_on for message in (*self.sends, *self.receives))


@dataclass(frozen=True)
class Adapters:
    """Adapters that are added to the weights that they change before these are sent.

    lora:    their settings.
    ranks:   ranks that gather their shards of them, this one among them; a single one stores all that it merges.
    parts:   parts that ``ranks`` store together, which change their parts of the weights.
    shards:  part of each of these parts on each of ``ranks``, in their order.
    """

    lora: LoraSpec
    ranks: tuple[int, ...]
    parts: Parts
    shards: tuple[Parts, ...]


@dataclass(frozen=True)
class SyncPlan:
    """Weights of a trained model to a copy of it, on one rank.

    source:       the trained model.
    destination:  the copy.
    rank:         the rank that this plan is for.
    dtype:        type in which the weights are sent.
    buckets:      in the order of sending.
    source_parts: this rank's parts of the trained model, by the copy's names; empty where it is not.
    parts:        this rank's parts of the copy; empty where it is not.
    adapters:     None: weights are sent as they are.
    """

    source: ModelName
    destination: ModelName
    rank: int
    dtype: Dtype
    buckets: tuple[RankBucket, ...]
    source_parts: Parts
    parts: Parts
    adapters: Adapters | None

    @property
    def is_sent_on(self) -> bool:
        """Whether some regions that arrive here are sent on, or have been."""
        return any(bucket.sends_on for bucket in self.buckets)

    @property
    def bytes_sent_on(self) -> int:
        """Bytes that this rank receives and then sends to others."""
        messages = [message for bucket in self.buckets for message in bucket.sends if message.is_sent_on]
        elements = sum(message.num_elements * len(message.destinations) for message in messages)
        return DTYPE_BYTES[self.dtype] * elements

    @classmethod
    def of(
        cls,
        source: PlacedModel,
        destination: PlacedModel,
        shape: ModelShape,
        bucket_bytes: int,
        rank: int,
        node_of: NodeOf | None = None,
        dtype: Dtype | None = None,
        overlaps: bool = False,
    ) -> SyncPlan:
        """Plan the part of ``rank`` in a Sync of the trained weights of ``source`` to ``destination``.

        ``dtype``: ``sync.dtype``. ``overlaps``: whether it overlaps other work.
        """
        transfers = transfers_of(source, destination, shape, bucket_bytes, node_of, dtype, overlaps)
        return sync_on_rank(transfers, source, destination, shape, rank, dtype)

    @staticmethod
    def bytes_by_link(
        source: PlacedModel,
        destination: PlacedModel,
        shape: ModelShape,
        bucket_bytes: int,
        node_of: NodeOf | None = None,
        dtype: Dtype | None = None,
        overlaps: bool = False,
    ) -> Mapping[tuple[int, int], float]:
        """Return the bytes that cross from rank to rank in one Sync: weights, and adapters that are gathered.

        Replicas of the source are counted with equal shares. Checksums are not counted: 8 bytes a message.
        """
        found: dict[tuple[int, int], float] = defaultdict(float)
        item = destination.sent_item_bytes(dtype)
        most = _bucket_elements(destination, bucket_bytes, dtype)
        for link, elements in mean_links(*_holdings(source, destination, shape), most, node_of, overlaps).items():
            found[link] += item * elements
        for ranks, size in _gathered_bytes(source, destination, shape):
            for link in permutations(ranks, 2):
                found[link] += size
        return dict(found)

    @staticmethod
    def all_bytes(source: PlacedModel, destination: PlacedModel, shape: ModelShape, dtype: Dtype | None = None) -> int:
        """Return the sum of ``bytes_by_link``, which depends on no bucket: elements that destination ranks lack."""
        sent, needed = _holdings(source, destination, shape)
        total = sum(len(ranks) * lacking(sent.get(ranks[0], {}), needed[ranks[0]]) for ranks in alike(needed, sent))
        gathers = sum(
            len(ranks) * (len(ranks) - 1) * size for ranks, size in _gathered_bytes(source, destination, shape)
        )
        return destination.sent_item_bytes(dtype) * total + gathers


def sync_on_rank(
    transfers: TransferPlan,
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    rank: int,
    dtype: Dtype | None = None,
) -> SyncPlan:
    """Return the part of ``rank`` in a Sync of these transfers."""
    return SyncPlan(
        source=source.name,
        destination=destination.name,
        rank=rank,
        dtype=destination.sent_dtype(dtype),
        buckets=_on_rank(transfers, rank),
        source_parts=sent_parts(source, destination, shape, rank) if rank in source.ranks else {},
        parts=shape.trained_parts(destination, rank) if rank in destination.ranks else {},
        adapters=merged_adapters(source, destination, shape, rank),
    )


def transfers_of(
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    bucket_bytes: int,
    node_of: NodeOf | None = None,
    dtype: Dtype | None = None,
    overlaps: bool = False,
) -> TransferPlan:
    """Return the transfers of a Sync of the trained weights. All buckets of a rank at a time are ``bucket_bytes``."""
    most = _bucket_elements(destination, bucket_bytes, dtype)
    return plan_transfers(*_holdings(source, destination, shape), most, node_of, overlaps)


def _bucket_elements(destination: PlacedModel, bucket_bytes: int, dtype: Dtype | None) -> int:
    """Return the elements that the buffers of one bucket may have."""
    return max(1, bucket_bytes // (SyncSpec.NUM_BUCKETS * destination.sent_item_bytes(dtype)))


def _holdings(source: PlacedModel, destination: PlacedModel, shape: ModelShape) -> tuple[Holdings, Holdings]:
    """Return the parts that ranks of the source and of the copy store of the weights that are sent."""
    return (
        source.by_position(lambda rank: sent_parts(source, destination, shape, rank)),
        destination.by_position(lambda rank: shape.trained_parts(destination, rank)),
    )


def _gathered_bytes(
    source: PlacedModel, destination: PlacedModel, shape: ModelShape
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield sets of ranks that gather adapters, in float32, with the bytes that each sends to each."""
    for ranks in destination.adapter_gathers(source) if shape.is_merged_in(destination) else ():
        sizes = [0] * len(ranks)
        for names, parts in _alike_adapters(source, destination, shape, ranks):
            sizes = [size + len(names) * part.num_elements for size, part in zip(sizes, parts, strict=True)]
        yield ranks, 4 * max(sizes)


def lacking(own: Parts, needed: Parts) -> int:
    """Return the elements of ``needed`` that ``own`` does not have."""
    # layers share their parts
    pairs = ((part, own.get(name)) for name, part in needed.items())
    alike_pairs: dict[tuple[int, int], list[tuple[Part, Part | None]]] = defaultdict(list)
    for pair in pairs:
        alike_pairs[id(pair[0]), id(pair[1])].append(pair)
    return sum(len(each) * uncovered(*each[0]) for each in alike_pairs.values())


def uncovered(part: Part, own: Part | None) -> int:
    """Return the elements of ``part`` that ``own``, of the same tensor, does not have."""
    return part.num_elements - (0 if own is None else overlap(own, part))


def sent_parts(
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    rank: int,
    names: frozenset[str] | None = None,
) -> Parts:
    """Return the part of ``source`` on ``rank`` of each weight that is sent, by the copy's names.

    ``names``: of the weights in question; None: all.
    """
    sent = named(shape.of_copy(destination).trained, names)
    if not shape.is_merged_in(destination):
        parts = shape.parts_on(source, rank, names)
        return {name: parts[name] for name, _ in sent if name in parts}
    bases = {name: ParameterName(name).merged_from[0] for name, _ in sent}
    parts = shape.parts_on(source, rank, None if names is None else frozenset(bases.values()))
    return {name: parts[base] for name, base in bases.items() if base in parts}


def merged_adapters(source: PlacedModel, destination: PlacedModel, shape: ModelShape, rank: int) -> Adapters | None:
    """Return the adapters that ``rank`` merges before a Sync sends the weights; None if it merges none."""
    lora = destination.adapters_to_merge(source)
    if lora is None or rank not in source.ranks:
        return None
    ranks = source.shard_set(rank)
    together: dict[str, Part] = {}
    within: tuple[dict[str, Part], ...] = tuple({} for _ in ranks)
    for names, parts in _alike_adapters(source, destination, shape, ranks):
        outer = _together(parts)
        inner = [_within(outer, part) for part in parts]
        for name in names:
            together[name] = outer
            for shard, part in zip(within, inner, strict=True):
                shard[name] = part
    return Adapters(lora, ranks, together, within)


def adapter_elements(source: PlacedModel, destination: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the elements of the adapters that a rank of ``source`` merges before a Sync sends the weights."""
    alike = _alike_adapters(source, destination, shape, source.shard_set(rank))
    return sum(len(names) * _together(parts).num_elements for names, parts in alike)


def _alike_adapters(
    source: PlacedModel, destination: PlacedModel, shape: ModelShape, ranks: tuple[int, ...]
) -> Iterator[tuple[list[str], list[Part]]]:
    """Yield the adapters that are merged, split alike: their names, and the part of each on each of ``ranks``, of one
    pipeline stage."""
    first = shape.parts_on(source, ranks[0])
    # layers share their parts
    alike: dict[int, list[str]] = defaultdict(list)
    for name in _merged_names(destination, shape):
        if name in first:
            alike[id(first[name])].append(name)
    firsts = frozenset(names[0] for names in alike.values())
    shards = [shape.parts_on(source, rank, firsts) for rank in ranks]
    for names in alike.values():
        yield names, [parts[names[0]] for parts in shards]


def _merged_names(destination: PlacedModel, shape: ModelShape) -> Iterator[str]:
    """Yield the names of the adapters of the weights that are sent merged."""
    for name, _ in shape.of_copy(destination).trained:
        yield from ParameterName(name).merged_from[1:]


def _together(parts: Sequence[Part]) -> Part:
    """Return the part that ``parts`` of a tensor cover together."""
    sides = zip(*(part.box for part in parts), strict=True)
    return Part(
        parts[0].shape,
        tuple(range(min(each.start for each in side), max(each.stop for each in side)) for side in sides),
    )


def _within(outer: Part, part: Part) -> Part:
    """Return ``part``, which is inside ``outer``, as a part of the elements of ``outer``."""
    sides = zip(outer.box, part.box, strict=True)
    box = tuple(range(inner.start - whole.start, inner.stop - whole.start) for whole, inner in sides)
    return Part(tuple(map(len, outer.box)), box, part.flat)


def _on_rank(transfers: TransferPlan, rank: int) -> tuple[RankBucket, ...]:
    """Return the part of ``rank`` in each bucket; nothing if it has none."""
    found = tuple(
        RankBucket(
            sends=tuple(message for message in bucket.messages if message.source == rank),
            receives=tuple(message for message in bucket.messages if rank in message.destinations),
            stays=bucket.stays.get(rank, ()),
        )
        for bucket in transfers.buckets
    )
    return found if any(bucket.sends or bucket.receives or bucket.stays for bucket in found) else ()
