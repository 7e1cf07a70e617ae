"""Execute a Sync: weights of a trained model to a copy of it, in buckets, with a checksum taken on both sides.

Each source rank sends the elements that others need, a receiver has them written into the copy's live weights, and it
compares checksums of what it then stores. Large regions that are contiguous and of the type that is sent travel from
live weights to live weights; others are packed into buffers. What a rank has itself it copies from tensor to tensor.
What it is to send on, it sends from the copy. A rank waits for its receivers.

A sync that overlaps what its ranks compute needs memory for all that the source sends: it packs everything first and
waits for nobody, and a receiver has all of it arrive there, until the copy is used next. Only then do its ranks send on
what they have received.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.buffers import BufferPool
from flexrlhf.comm.checksum import checksum
from flexrlhf.comm.point_to_point import Begun, Message, exchange
from flexrlhf.comm.trained_values import TrainedValues, view_of
from flexrlhf.comm.weights import WeightGather, Weights
from flexrlhf.comm.world import Wait
from flexrlhf.config.spec import SyncSpec
from flexrlhf.errors import RunStopped
from flexrlhf.weights.sync_plan import RankBucket, SyncPlan
from flexrlhf.weights.transfer_plan import LARGE, NUM_BUCKETS, Regions, WeightMessage, count


class ChecksumError(RunStopped):
    """The copy stores other weights after a Sync than its source sent."""


@dataclass(frozen=True)
class SyncChannel:
    """A sync plan, with the torch objects that carry it out on this rank.

    plan:      messages and parts.
    dtype:     type in which the weights are sent.
    device:    of the buffers.
    group:     of senders and receivers; None where nothing crosses between ranks.
    gather:    collective that makes adapters whole before they are merged; None: none are merged here.
    overlaps:  whether it overlaps what its ranks compute.
    """

    plan: SyncPlan
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None
    gather: WeightGather | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class _InFlight:
    """Messages of this rank under way.

    messages:  as they are awaited.
    sent:      memory that must live until then.
    buffer:    part of the pool that is then given back; None: none was taken.
    """

    messages: Sequence[Begun]
    sent: Sequence[Message]
    buffer: Tensor | None = None


@dataclass(frozen=True)
class _Packed:
    """Vectors of one bucket, each with its message: live weights, or parts of ``buffer``."""

    vectors: tuple[tuple[WeightMessage, Tensor], ...]
    buffer: Tensor | None


@dataclass(frozen=True)
class _Incoming:
    """A vector for this rank.

    regions:  of the copy that it is written into; none: ``numbers`` are the copy's own.
    """

    source: int
    numbers: Tensor
    regions: Regions


@dataclass(frozen=True)
class _Arriving:
    """Messages under way, and the vectors that they bring."""

    messages: Sequence[Begun]
    vectors: Sequence[_Incoming]


@dataclass(frozen=True)
class _ArrivingBucket:
    """One bucket under way, some of its vectors in ``buffer``."""

    bucket: RankBucket
    arriving: _Arriving
    buffer: Tensor


class _Space:
    """A buffer of which vectors are taken, one behind the other."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self._taken = buffer, 0

    def take(self, size: int) -> Tensor:
        """Return the next ``size`` numbers."""
        self._taken += size
        return self.buffer[self._taken - size : self._taken]


@dataclass(frozen=True)
class _Checksums:
    """Checksums of messages, by the rank at their other end and in their order; of what stays, by the rank itself.

    sent:    of what was sent.
    stored:  of what this rank then stores.
    names:   a weight in each of what it stores.
    """

    sent: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    stored: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    names: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))


class WeightMover:
    """Syncs on one rank: buckets in flight by source model, and a pool of their memory."""

    def __init__(self, settings: SyncSpec, wait: Wait) -> None:
        self._settings, self._wait = settings, wait
        self._sending: dict[str, deque[_InFlight]] = {}
        self._pool = BufferPool()

    def run(self, channel: SyncChannel, source: Weights | None, copy: Weights | None) -> int:
        """Execute this rank's part of a Sync and return the bytes sent, without checksums. Raises ChecksumError.

        source:  live local parts of the trained model; None where it is not on this rank.
        copy:    live local parts of the copy, which are overwritten; None where it is not on this rank.
        """
        sending = self._sending.setdefault(channel.plan.source, deque())
        self._await_all(sending)
        return _Exchange(channel, self._settings, self._wait, self._pool, sending).run(source, copy)

    def receive(self, channel: SyncChannel) -> Receipt:
        """Begin to receive what the trained model's ranks send in the next Sync of ``channel``; the copy is on none."""
        return Receipt(_Exchange(channel, self._settings, self._wait, self._pool, deque()))

    def close(self) -> None:
        """Await all sends that are under way."""
        for sending in self._sending.values():
            self._await_all(sending)

    def _await_all(self, sending: deque[_InFlight]) -> None:
        while sending:
            _await(sending.popleft(), self._wait, self._pool)


def _await(bucket: _InFlight, wait: Wait, pool: BufferPool) -> None:
    """Wait for the messages of a bucket and give its memory back."""
    for work, ranks in bucket.messages:
        wait(work, ranks)
    if bucket.buffer is not None:
        pool.give(bucket.buffer)


class _Exchange:
    """One Sync on this rank."""

    def __init__(
        self, channel: SyncChannel, settings: SyncSpec, wait: Wait, pool: BufferPool, sending: deque[_InFlight]
    ) -> None:
        self._channel, self._plan, self._settings = channel, channel.plan, settings
        self._wait, self._pool, self._sending = wait, pool, sending
        # whether this rank waits for its receivers, with weights that do not change meanwhile
        self._waits = not channel.overlaps
        self._sums, self._num_bytes = _Checksums(), 0
        self._most_sent = max((_size(bucket.sends) for bucket in self._plan.buckets), default=0)
        self._most_received = max((_size(bucket.receives) for bucket in self._plan.buckets), default=0)

    def run(self, source: Weights | None, copy: Weights | None) -> int:
        """Send, copy and receive; return the bytes sent."""
        values = None if source is None else self._values(source)
        self._walk(self._plan.buckets, values, copy)
        return self._num_bytes

    def begin(self) -> tuple[list[_ArrivingBucket], _Arriving]:
        """Begin to receive what the source sends into memory of its own; return buckets and checksums under way."""
        first = [bucket for bucket in self._plan.buckets if not bucket.sends_on]
        begun = (self._begin(bucket, _Packed((), None), None) for bucket in first)
        arriving = [bucket for bucket in begun if bucket is not None]
        return arriving, self._exchanged_checksums(first) if self._settings.checksum else _Arriving((), ())

    def finish(self, arriving: Sequence[_ArrivingBucket], sums: _Arriving, copy: Weights) -> None:
        """Store what ``begin`` has begun to receive, and exchange the rest with other ranks of the copy.

        Raises ChecksumError.
        """
        for bucket in arriving:
            self._store(bucket, copy)
        if self._settings.checksum:
            self._compare(self._arrived(sums))
        self._sums, self._waits = _Checksums(), True
        self._walk([bucket for bucket in self._plan.buckets if bucket.sends_on], None, copy)

    def _walk(self, buckets: Sequence[RankBucket], values: TrainedValues | None, copy: Weights | None) -> None:
        """Send, copy and receive ``buckets``, and compare their checksums."""
        packed = (self._packed(bucket, values, copy) for bucket in buckets)
        # to overlap, all buckets are packed before the first one is sent
        vectors = packed if self._waits else iter(list(packed))
        arriving: deque[_ArrivingBucket | None] = deque()
        for bucket in buckets:
            arriving.append(self._begin(bucket, next(vectors), copy))
            if bucket.stays:
                assert values is not None and copy is not None, "both models are on this rank"
                self._copy(bucket.stays, values, copy)
            # what a bucket has become is stored while the next one arrives, so that the one after can send it on
            if len(arriving) == NUM_BUCKETS - 1:
                self._store(arriving.popleft(), copy)
        while arriving:
            self._store(arriving.popleft(), copy)
        if self._settings.checksum:
            self._compare(self._arrived(self._exchanged_checksums(buckets)))
        while self._sending and self._waits:
            # live weights are sent, which the next training changes
            _await(self._sending.popleft(), self._wait, self._pool)

    def _values(self, source: Weights) -> TrainedValues:
        plan, gather = self._plan, self._channel.gather
        if plan.adapters is None or gather is None:
            return TrainedValues(source, plan.source_parts)
        names = list(plan.adapters.shards[0])
        self._num_bytes += gather.bytes_sent(names, torch.float32.itemsize)
        adapters = gather.whole(source, names, torch.float32)
        return TrainedValues(source, plan.source_parts, plan.adapters.lora, adapters)

    def _packed(self, bucket: RankBucket, values: TrainedValues | None, copy: Weights | None) -> _Packed:
        """Return the vectors that ``bucket`` sends."""
        if not bucket.sends:
            return _Packed((), None)
        copied = None if copy is None else TrainedValues(copy, self._plan.parts)
        if self._waits:
            while len(self._sending) >= NUM_BUCKETS - 1:
                _await(self._sending.popleft(), self._wait, self._pool)
        space = _Space(self._buffer(bucket.sends, self._most_sent))
        found: list[tuple[WeightMessage, Tensor]] = []
        for message in bucket.sends:
            pieces: list[Tensor] = []
            origin = copied if message.is_sent_on else values
            assert origin is not None, "what is sent is on this rank"
            for regions in message.vectors:
                vector, of_regions = self._vector(regions, origin, space)
                found.append((message, vector))
                pieces += of_regions
            if self._settings.checksum:
                total = checksum(pieces)
                for receiver in message.destinations:
                    self._sums.sent[receiver].append(total)
        return _Packed(tuple(found), space.buffer)

    def _vector(self, regions: Regions, values: TrainedValues, space: _Space) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the elements of ``regions`` as a vector, and its part of each region.

        That of a large region is the live weights, where they are contiguous and of the type that is sent, unless
        training goes on meanwhile.
        """
        if regions[0].num_elements >= LARGE and values.lora is None and self._waits:
            value = values[regions[0]]
            if value.dtype == self._channel.dtype and value.is_contiguous():
                return value.view(-1), [value]
        vector = space.take(count(regions))
        pieces = vector.split([region.num_elements for region in regions])
        for region, piece in zip(regions, pieces, strict=True):
            piece.view([len(side) for side in region.box]).copy_(values[region])
        return vector, pieces

    def _begin(self, bucket: RankBucket, packed: _Packed, copy: Weights | None) -> _ArrivingBucket | None:
        """Begin to send and to receive the vectors of a bucket; return what arrives, None where nothing does."""
        space = _Space(self._buffer(bucket.receives, self._most_received)) if bucket.receives else None
        incoming = [] if space is None else self._incoming(bucket, space, copy)
        sent = [(vector, receiver) for message, vector in packed.vectors for receiver in message.destinations]
        self._num_bytes += sum(vector.nbytes for vector, _ in sent)
        sending, arriving = self._exchange(sent, incoming)
        if packed.buffer is not None:
            self._sending.append(_InFlight(sending, sent, packed.buffer))
        return None if space is None else _ArrivingBucket(bucket, arriving, space.buffer)

    def _exchange(self, sent: Sequence[Message], incoming: Sequence[_Incoming]) -> tuple[Sequence[Begun], _Arriving]:
        """Begin to send and to receive as one batch.

        All ranks have their batches in one order, so that none waits for a later one of another rank.
        """
        received = [(each.numbers, each.source) for each in incoming]
        sending, arriving = exchange(sent, received, self._channel.group)
        return sending, _Arriving(arriving, incoming)

    def _incoming(self, bucket: RankBucket, space: _Space, copy: Weights | None) -> list[_Incoming]:
        """Return the vectors of ``bucket`` for this rank.

        Those of large contiguous regions are in the copy itself, unless it has another type than is sent, or is in use
        meanwhile (``copy`` is None).
        """
        found = []
        for message in bucket.receives:
            for regions in message.vectors:
                live = None if copy is None or regions[0].num_elements < LARGE else self._views(regions, copy)[0]
                if live is not None and live.dtype == self._channel.dtype and live.is_contiguous():
                    found.append(_Incoming(message.source, live.view(-1), ()))
                else:
                    found.append(_Incoming(message.source, space.take(count(regions)), regions))
        return found

    def _store(self, arriving: _ArrivingBucket | None, copy: Weights | None) -> None:
        """Await the vectors of a bucket, if there are any, and write them into the copy."""
        if arriving is None:
            return
        assert copy is not None, "the copy is on this rank"
        for vector in self._awaited(arriving.arriving):
            if vector.regions:
                self._write(vector, copy)
        for message in arriving.bucket.receives:
            regions = tuple(chain.from_iterable(message.vectors))
            self._note(message.source, regions, self._views(regions, copy))
        self._pool.give(arriving.buffer)

    def _write(self, vector: _Incoming, copy: Weights) -> None:
        """Write a vector into the copy."""
        views = self._views(vector.regions, copy)
        pieces = vector.numbers.split([view.numel() for view in views])
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(piece.view(view.shape))

    def _copy(self, regions: Regions, values: TrainedValues, copy: Weights) -> None:
        """Copy what this rank has itself."""
        rank = self._plan.rank
        for region, view in zip(regions, self._views(regions, copy), strict=True):
            value = values[region].to(self._channel.dtype)
            view.copy_(value)
            if self._settings.checksum:
                self._sums.sent[rank].append(checksum([value]))
            self._note(rank, (region,), [view])

    def _views(self, regions: Regions, copy: Weights) -> list[Tensor]:
        """Return ``regions`` in the live weights of the copy."""
        return [view_of(copy[region.name].detach(), self._plan.parts[region.name], region.box) for region in regions]

    def _note(self, source: int, regions: Regions, stored: Sequence[Tensor]) -> None:
        """Take the checksum of what is stored."""
        if self._settings.checksum:
            # the type that was sent holds what a larger one stores of it
            self._sums.stored[source].append(checksum([each.to(self._channel.dtype) for each in stored]))
            self._sums.names[source].append(regions[0].name)

    def _exchanged_checksums(self, buckets: Sequence[RankBucket]) -> _Arriving:
        """Send the checksums of what this rank has sent, and begin to receive those of what ``buckets`` bring."""
        sent = [
            (torch.stack(sums), receiver) for receiver, sums in self._sums.sent.items() if receiver != self._plan.rank
        ]
        expected = Counter(message.source for bucket in buckets for message in bucket.receives)
        incoming = [
            _Incoming(source, torch.empty(size, dtype=torch.int64, device=self._channel.device), ())
            for source, size in expected.items()
        ]
        sending, arriving = self._exchange(sent, incoming)
        self._sending.append(_InFlight(sending, sent))
        return arriving

    def _arrived(self, awaited: _Arriving) -> dict[int, Tensor]:
        """Await checksums; return those of all that this rank stores, by the rank that has sent it."""
        own = self._plan.rank
        found = {own: torch.stack(self._sums.sent[own])} if own in self._sums.sent else {}
        return found | {each.source: each.numbers for each in self._awaited(awaited)}

    def _awaited(self, arriving: _Arriving) -> Sequence[_Incoming]:
        """Return vectors once all of them are there."""
        for work, ranks in arriving.messages:
            self._wait(work, ranks)
        return arriving.vectors

    def _compare(self, sent: dict[int, Tensor]) -> None:
        """Raise ChecksumError where this rank stores something else than was sent."""
        for source, stored in self._sums.stored.items():
            same = (torch.stack(stored) == sent[source]).tolist()
            wrong = [name for name, is_same in zip(self._sums.names[source], same, strict=True) if not is_same]
            if wrong:
                plan = self._plan
                raise ChecksumError(
                    f"sync weights {plan.source} -> {plan.destination}: rank {plan.rank} holds other weights than "
                    f"rank {source} sent, in the bucket of {wrong[0]}"
                )

    def _buffer(self, messages: Sequence[WeightMessage], most: int) -> Tensor:
        """Return memory for the messages of a bucket; of the largest one's size ``most``, where buckets take turns."""
        size = most if self._waits else _size(messages)
        return self._pool.take(size, self._channel.dtype, self._channel.device)


class Receipt:
    """Weights that arrive while the copy that they are for is still in use.

    Where ranks of the copy send on to each other, all of them store before the same instruction.
    """

    def __init__(self, exchange: _Exchange) -> None:
        """Begin to receive."""
        self._exchange = exchange
        self._arriving, self._sums = exchange.begin()

    def store(self, copy: Weights) -> None:
        """Await the weights, write them into ``copy``, live local parts, and exchange the rest with ranks next to it.

        Raises ChecksumError.
        """
        self._exchange.finish(self._arriving, self._sums, copy)


def _size(messages: Sequence[WeightMessage]) -> int:
    return sum(message.num_elements for message in messages)
