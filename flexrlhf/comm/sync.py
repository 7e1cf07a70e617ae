"""Execution of a Sync: weights of a trained model to a copy of it, in buckets, with a checksum taken on both sides.

Each source rank sends the elements that others need, a receiver has them written into the copy's live weights, and it
compares checksums of the weights that it then stores. Large regions that are contiguous and of the type that is sent
travel from live weights to live weights; others are packed into buffers. Elements that a rank has itself it copies from
tensor to tensor; elements that it sends on, it sends from the copy. A rank waits for its receivers.

A sync that overlaps computation needs memory for all that the source sends: it packs everything first and waits for
nobody, and a receiver has all of it arrive there, until the copy is used next. Only then do its ranks send on the
elements that they have received.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.checksum import checksum
from flexrlhf.comm.point_to_point import Begun, TensorMessage, exchange
from flexrlhf.comm.weights import TrainedValues, WeightGather, Weights, view_of
from flexrlhf.comm.world import Wait
from flexrlhf.config.spec import SyncSpec
from flexrlhf.errors import RunStopped
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.sync_plan import RankBucket, SyncPlan
from flexrlhf.weights.transfer_plan import Region, Regions


class ChecksumError(RunStopped):
    """The copy stores other weights after a Sync than its source sent."""


@dataclass(frozen=True)
class SyncChannel:
    """A sync plan, with the torch objects that carry it out on this rank.

    plan:      messages and parts.
    dtype:     type in which the weights are sent.
    device:    of the buffers.
    group:     of senders and receivers; None if nothing crosses between ranks.
    gather:    collective of the adapters that this rank merges; None: none are merged here.
    overlaps:  whether it overlaps the computation of its ranks.
    reused:    weights that the copy has from its source on this rank without a transfer.
    """

    plan: SyncPlan
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup | None
    gather: WeightGather | None = None
    overlaps: bool = False
    reused: frozenset[str] = frozenset()


class BufferPool:
    """Buffers that are not in use.

    Fresh memory is mapped page by page when it is first written, which on a CPU takes as long as to send it.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a vector of ``size`` elements of any value."""
        for index, buffer in enumerate(self._buffers):
            if (len(buffer), buffer.dtype, buffer.device) == (size, dtype, device):
                return self._buffers.pop(index)
        return torch.empty(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer of ``take``."""
        self._buffers.append(buffer)


@dataclass(frozen=True)
class _Sending:
    """Messages that this rank has begun to send.

    begun:   as they are awaited.
    sent:    memory that must live until then.
    buffer:  of the pool, which then gets it back; None: none was taken.
    """

    begun: Sequence[Begun]
    sent: Sequence[TensorMessage]
    buffer: Tensor | None = None

    def finish(self, wait: Wait, pool: BufferPool) -> None:
        for work, ranks in self.begun:
            wait(work, ranks)
        if self.buffer is not None:
            pool.give(self.buffer)


@dataclass(frozen=True)
class _Arriving:
    """Bucket that this rank has begun to receive.

    begun:   messages as they are awaited.
    packed:  vectors that are then written into the copy, with their regions; the others arrive in the copy itself.
    buffer:  of the pool, which has the packed vectors.
    """

    bucket: RankBucket
    begun: Sequence[Begun]
    packed: Sequence[tuple[Tensor, Regions]]
    buffer: Tensor


class _Space:
    """A buffer of which vectors are taken, one behind the other."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self._taken = buffer, 0

    def take(self, size: int) -> Tensor:
        self._taken += size
        return self.buffer[self._taken - size : self._taken]


class WeightMover:
    """Syncs on one rank: buckets in flight by source model, and a pool of their memory."""

    def __init__(self, settings: SyncSpec, wait: Wait) -> None:
        self._settings, self._wait = settings, wait
        self._sending: dict[str, deque[_Sending]] = {}
        self._pool = BufferPool()

    def run(self, channel: SyncChannel, source: Weights | None, copy: Weights | None) -> int:
        """Execute this rank's part of a Sync and return the bytes sent, without checksums. Raises ChecksumError.

        source:  live local parts of the trained model; None if it is not on this rank.
        copy:    live local parts of the copy, which are overwritten; None if it is not on this rank.
        """
        sending = self._sending.setdefault(channel.plan.source, deque())
        self._await_all(sending)
        return _Exchange(channel, self._settings, self._wait, self._pool, sending).run(source, copy)

    def receive(self, channel: SyncChannel) -> Receipt:
        """Begin to receive the weights of the next Sync of ``channel``, whose copy is on none of the source's ranks."""
        return Receipt(channel, self._settings, self._wait, self._pool)

    def close(self) -> None:
        """Await all sends that are under way."""
        for sending in self._sending.values():
            self._await_all(sending)

    def _await_all(self, sending: deque[_Sending]) -> None:
        while sending:
            sending.popleft().finish(self._wait, self._pool)


class _Exchange:
    """One Sync on this rank.

    Checksums of messages are in the order of the messages, by the rank at their other end, or by this rank itself for
    elements that stay here: of elements that were sent, and of elements that this rank then stores, with the name of a
    weight among them.
    """

    def __init__(
        self, channel: SyncChannel, settings: SyncSpec, wait: Wait, pool: BufferPool, sending: deque[_Sending]
    ) -> None:
        self._channel, self._plan, self._settings = channel, channel.plan, settings
        self._wait, self._pool, self._sending = wait, pool, sending
        # whether this rank waits for its receivers, with weights that do not change meanwhile
        self._waits = not channel.overlaps
        self._sent_sums: dict[int, list[Tensor]] = defaultdict(list)
        self._stored_sums: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        self._num_bytes = 0
        self._most_sent = max((bucket.num_sent for bucket in self._plan.buckets), default=0)
        self._most_received = max((bucket.num_received for bucket in self._plan.buckets), default=0)

    def run(self, source: Weights | None, copy: Weights | None) -> int:
        """Send, copy and receive; return the bytes sent."""
        values = None if source is None else self._values(source)
        self._walk(self._plan.buckets, values, copy)
        return self._num_bytes

    def _walk(self, buckets: Sequence[RankBucket], values: TrainedValues | None, copy: Weights | None) -> None:
        """Send, copy and receive ``buckets``, and compare their checksums."""
        packed = (self._packed(bucket, values, copy) for bucket in buckets)
        # to overlap, all buckets are packed before the first one is sent
        vectors = packed if self._waits else iter(list(packed))
        arriving: deque[_Arriving | None] = deque()
        for bucket in buckets:
            arriving.append(self._begin(bucket, *next(vectors), copy))
            if stays := tuple(each for each in bucket.stays if each.name not in self._channel.reused):
                assert values is not None and copy is not None, "both models are on this rank"
                self._copy(stays, values, copy)
            # a bucket is stored while the next one arrives, so that the one after can send it on
            if len(arriving) == SyncSpec.NUM_BUCKETS - 1:
                self._store(arriving.popleft(), copy)
        while arriving:
            self._store(arriving.popleft(), copy)
        if self._settings.checksum:
            self._compare(*self._exchange_checksums(buckets))
        # live weights are sent, which the next training changes
        while self._sending and self._waits:
            self._sending.popleft().finish(self._wait, self._pool)

    def _values(self, source: Weights) -> TrainedValues:
        plan, gather = self._plan, self._channel.gather
        if plan.adapters is None or gather is None:
            return TrainedValues(source, plan.source_parts)
        names = list(plan.adapters.parts)
        self._num_bytes += gather.bytes_sent(names, torch.float32.itemsize)
        adapters = gather.whole(source, names, torch.float32)
        return TrainedValues(source, plan.source_parts, plan.adapters.lora, adapters, plan.adapters.parts)

    def _packed(
        self, bucket: RankBucket, values: TrainedValues | None, copy: Weights | None
    ) -> tuple[list[TensorMessage], Tensor | None]:
        """Return the messages that ``bucket`` sends, of live weights or of parts of a buffer, and that buffer."""
        if not bucket.sends:
            return [], None
        copied = None if copy is None else TrainedValues(copy, self._plan.parts)
        while self._waits and len(self._sending) >= SyncSpec.NUM_BUCKETS - 1:
            self._sending.popleft().finish(self._wait, self._pool)
        space = _Space(self._buffer(bucket.num_sent, self._most_sent))
        sent: list[TensorMessage] = []
        for message in bucket.sends:
            pieces: list[Tensor] = []
            origin = copied if message.is_sent_on else values
            assert origin is not None, "elements that are sent are on this rank"
            for regions in message.vectors:
                vector, of_regions = self._vector(regions, origin, space)
                sent += [(vector, receiver) for receiver in message.destinations]
                pieces += of_regions
            if self._settings.checksum:
                total = checksum(pieces)
                for receiver in message.destinations:
                    self._sent_sums[receiver].append(total)
        return sent, space.buffer

    def _vector(self, regions: Regions, values: TrainedValues, space: _Space) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the elements of ``regions`` as a vector, and its part of each region.

        A large region is the live weights, if they are contiguous and of the type that is sent, unless training goes on
        meanwhile.
        """
        if regions[0].is_large and values.lora is None and self._waits:
            value = values[regions[0]]
            if value.dtype == self._channel.dtype and value.is_contiguous():
                return value.view(-1), [value]
        vector = self._packed_vector(regions, space)
        pieces = vector.split([region.num_elements for region in regions])
        for region, piece in zip(regions, pieces, strict=True):
            piece.view([len(side) for side in region.box]).copy_(values[region])
        return vector, pieces

    def _begin(
        self, bucket: RankBucket, sent: list[TensorMessage], buffer: Tensor | None, copy: Weights | None
    ) -> _Arriving | None:
        """Begin to send ``sent``, and to receive the vectors of a bucket, as one batch; None if nothing arrives.

        All ranks have their batches in one order, so that none waits for a later one of another rank.
        """
        space = _Space(self._buffer(bucket.num_received, self._most_received)) if bucket.receives else None
        received, packed = ([], []) if space is None else self._received(bucket, space, copy)
        self._num_bytes += sum(vector.nbytes for vector, _ in sent)
        sending, arriving = exchange(sent, received, self._channel.group)
        if buffer is not None:
            self._sending.append(_Sending(sending, sent, buffer))
        return None if space is None else _Arriving(bucket, arriving, packed, space.buffer)

    def _received(
        self, bucket: RankBucket, space: _Space, copy: Weights | None
    ) -> tuple[list[TensorMessage], list[tuple[Tensor, Regions]]]:
        """Return the vectors of ``bucket`` for this rank, and the ones outside of the copy, with their regions.

        Vectors of large contiguous regions are in the copy itself, unless it has another type than is sent, or is in
        use meanwhile (``copy`` is None).
        """
        received: list[TensorMessage] = []
        packed: list[tuple[Tensor, Regions]] = []
        for message in bucket.receives:
            for regions in message.vectors:
                live = None if copy is None or not regions[0].is_large else self._views(regions, copy)[0]
                if live is not None and live.dtype == self._channel.dtype and live.is_contiguous():
                    received.append((live.view(-1), message.source))
                else:
                    vector = self._packed_vector(regions, space)
                    received.append((vector, message.source))
                    packed.append((vector, regions))
        return received, packed

    def _store(self, arriving: _Arriving | None, copy: Weights | None) -> None:
        """Await the vectors of a bucket, if there are any, and write them into the copy."""
        if arriving is None:
            return
        assert copy is not None, "the copy is on this rank"
        self._await(arriving.begun)
        for vector, regions in arriving.packed:
            views = self._views(regions, copy)
            pieces = vector.split([view.numel() for view in views])
            for view, piece in zip(views, pieces, strict=True):
                view.copy_(piece.view(view.shape))
        for message in arriving.bucket.receives:
            regions = tuple(chain.from_iterable(message.vectors))
            self._note(message.source, regions, self._views(regions, copy))
        self._pool.give(arriving.buffer)

    def _copy(self, regions: Regions, values: TrainedValues, copy: Weights) -> None:
        rank = self._plan.rank
        for region, view in zip(regions, self._views(regions, copy), strict=True):
            value = values[region].to(self._type(region))
            view.copy_(value)
            if self._settings.checksum:
                self._sent_sums[rank].append(checksum([value]))
            self._note(rank, (region,), [view])

    def _packed_vector(self, regions: Regions, space: _Space) -> Tensor:
        """Return memory for ``regions``, which are sent as one vector."""
        size = sum(region.num_elements for region in regions)
        if self._type(regions[0]) == self._channel.dtype:
            return space.take(size)
        return torch.empty(size, dtype=self._type(regions[0]), device=self._channel.device)

    def _type(self, region: Region) -> torch.dtype:
        """Return the type in which ``region`` is sent: biases of routers are not rounded."""
        return torch.float32 if ParameterName(region.name).is_router_bias else self._channel.dtype

    def _views(self, regions: Regions, copy: Weights) -> list[Tensor]:
        return [view_of(copy[region.name].detach(), self._plan.parts[region.name], region.box) for region in regions]

    def _note(self, source: int, regions: Regions, stored: Sequence[Tensor]) -> None:
        """Take the checksum of stored elements, in the type that was sent."""
        if self._settings.checksum:
            pairs = zip(regions, stored, strict=True)
            total = checksum([each.to(self._type(region)) for region, each in pairs])
            self._stored_sums[source].append((regions[0].name, total))

    def _exchange_checksums(self, buckets: Sequence[RankBucket]) -> tuple[Sequence[Begun], list[TensorMessage]]:
        """Send the checksums of sent messages, and begin to receive the checksums of the messages of ``buckets``."""
        sent = [(torch.stack(sums), rank) for rank, sums in self._sent_sums.items() if rank != self._plan.rank]
        expected = Counter(message.source for bucket in buckets for message in bucket.receives)
        received = [
            (torch.empty(size, dtype=torch.int64, device=self._channel.device), source)
            for source, size in expected.items()
        ]
        sending, arriving = exchange(sent, received, self._channel.group)
        self._sending.append(_Sending(sending, sent))
        return arriving, received

    def _compare(self, arriving: Sequence[Begun], received: Sequence[TensorMessage]) -> None:
        """Await checksums. Raise ChecksumError if this rank stores something else than was sent."""
        plan = self._plan
        self._await(arriving)
        sent = {source: sums for sums, source in received}
        if plan.rank in self._sent_sums:
            sent[plan.rank] = torch.stack(self._sent_sums[plan.rank])
        for source, stored in self._stored_sums.items():
            same = (torch.stack([total for _, total in stored]) == sent[source]).tolist()
            wrong = [name for (name, _), is_same in zip(stored, same, strict=True) if not is_same]
            if wrong:
                raise ChecksumError(
                    f"sync weights {plan.source} -> {plan.destination}: rank {plan.rank} holds other weights than "
                    f"rank {source} sent, in the bucket of {wrong[0]}"
                )
        self._sent_sums.clear()
        self._stored_sums.clear()

    def _await(self, begun: Sequence[Begun]) -> None:
        for work, ranks in begun:
            self._wait(work, ranks)

    def _buffer(self, size: int, most: int) -> Tensor:
        """Return memory for the messages of a bucket; of the largest one's size ``most``, if buckets take turns."""
        return self._pool.take(most if self._waits else size, self._channel.dtype, self._channel.device)


class Receipt(_Exchange):
    """Weights that arrive in memory of their own while the copy that they are for is still in use.

    If ranks of the copy send on to each other, all of them store before the same instruction.
    """

    def __init__(self, channel: SyncChannel, settings: SyncSpec, wait: Wait, pool: BufferPool) -> None:
        """Begin to receive."""
        super().__init__(channel, settings, wait, pool, sending=deque())
        first = [bucket for bucket in self._plan.buckets if not bucket.sends_on]
        self._arriving = [self._begin(bucket, [], None, None) for bucket in first]
        self._sums = self._exchange_checksums(first) if settings.checksum else None

    def store(self, copy: Weights) -> None:
        """Await the weights, write them into ``copy``, live local parts, and exchange the rest with ranks next to it.

        Raises ChecksumError.
        """
        for bucket in self._arriving:
            self._store(bucket, copy)
        if self._sums is not None:
            self._compare(*self._sums)
        self._waits = True
        self._walk([bucket for bucket in self._plan.buckets if bucket.sends_on], None, copy)
