"""Execute a Sync: weights of a trained model to a copy of it, in buckets, with a checksum taken on both sides.

For each bucket the source's ranks put their shards together; a sender cuts out what each of its receivers stores and
sends copies, so training may go on. A receiver loads them and compares checksums of what it then stores. Without
``snapshot`` a sender has at most two buckets in flight and so waits for its receivers; with it all are copied first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.buffers import BufferPool
from flexrlhf.comm.checksum import checksum_of
from flexrlhf.comm.point_to_point import receive, send
from flexrlhf.comm.weights import WeightGather, Weights, cut
from flexrlhf.comm.world import Wait, Waitable
from flexrlhf.config.spec import SyncSpec
from flexrlhf.errors import RunStopped
from flexrlhf.weights.sync_plan import Packet, SendPlan, SyncPlan

Load = Callable[[dict[str, Tensor]], None]
"""Overwrites the named weights of the copy on this rank with vectors of its parts."""


class ChecksumError(RunStopped):
    """The copy stores other weights after a Sync than its source sent."""


@dataclass(frozen=True)
class SyncChannel:
    """A sync plan, with the torch objects that carry it out on this rank.

    plan:    buckets, receivers and parts.
    dtype:   type of the copy's weights.
    gather:  collective that makes the source's tensors whole; None on a rank that neither gathers nor sends.
    group:   of senders and receivers; None where nothing crosses between ranks.
    """

    plan: SyncPlan
    dtype: torch.dtype
    gather: WeightGather | None
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Sent:
    """Result of sending one Sync on this rank.

    num_bytes:  handed to torch for other ranks.
    delivered:  checksum of each bucket that this rank loaded into its own copy; None where it has loaded none.
    """

    num_bytes: int
    delivered: Tensor | None


@dataclass(frozen=True)
class _InFlight:
    """One buffer that is being sent; its memory must live until it has arrived."""

    receiver: int
    work: Waitable
    buffer: Tensor


@dataclass(frozen=True)
class _Packed:
    """One bucket ready to send: a buffer and a checksum for each receiver; ranks with the same parts share both."""

    buffers: dict[int, Tensor]
    checksums: dict[int, Tensor]


class WeightSender:
    """Sends of one rank: buffers in flight by source model, and a pool of their memory."""

    def __init__(self, settings: SyncSpec, wait: Wait) -> None:
        self._settings = settings
        self._wait = wait
        self._in_flight: dict[str, deque[list[_InFlight]]] = {}
        self._pool = BufferPool()

    def send(self, channel: SyncChannel, weights: Weights, load: Load | None) -> Sent:
        """Gather with the source's ranks and send to every receiver of this rank.

        ``weights``: live local shards of the source. ``load``: of the copy on this rank itself, if it is one of the
        receivers; it gets its parts without a buffer in between.
        """
        plan, gather, rank = channel.plan, channel.gather, channel.plan.rank
        assert plan.send is not None and gather is not None, "this rank neither gathers nor sends"
        in_flight = self._in_flight.setdefault(plan.source, deque())
        self._await_all(in_flight)
        buckets = self._buckets(channel, plan.send, gather, weights, load)
        sums: list[dict[int, Tensor]] = []
        num_bytes = sum(gather.bytes_sent(names, channel.dtype.itemsize) for names in plan.buckets)
        # a snapshot copies all buckets before the first one is sent
        for bucket in list(buckets) if self._settings.snapshot else buckets:
            num_bytes += self._post(in_flight, bucket.buffers, channel.group)
            sums.append(bucket.checksums)
        if self._settings.checksum and plan.send.receivers:
            checksums = {receiver: _of_buckets(sums, receiver) for receiver in plan.send.receivers}
            num_bytes += self._post(in_flight, checksums, channel.group)
        if self._settings.snapshot:
            self._pool.clear()
        return Sent(num_bytes, None if plan.own_parts is None else _of_buckets(sums, rank))

    def close(self) -> None:
        """Await all sends that are under way."""
        for in_flight in self._in_flight.values():
            self._await_all(in_flight)

    def _buckets(
        self, channel: SyncChannel, send: SendPlan, gather: WeightGather, weights: Weights, load: Load | None
    ) -> Iterator[_Packed]:
        """Gather, deliver and pack one bucket after the other."""
        plan = channel.plan
        for names, packets in zip(plan.buckets, send.packets, strict=True):
            tensors = gather.whole(weights, names, channel.dtype)
            checksums: dict[int, Tensor] = {}
            if plan.own_parts is not None:
                assert load is not None, "the copy is on this rank"
                pieces = {name: cut(tensors[name], plan.own_parts[name]) for name in names}
                load(pieces)
                checksums[plan.rank] = _checksum(list(pieces.values()), self._settings.checksum)
            packed = self._packed(names, packets, tensors, send.longest)
            yield _Packed(packed.buffers, checksums | packed.checksums)

    def _packed(self, names: Sequence[str], packets: Sequence[Packet], tensors: Weights, capacity: int) -> _Packed:
        packed = _Packed({}, {})
        for packet in packets:
            pieces = [cut(tensors[name], part) for name, part in zip(names, packet.parts, strict=True)]
            packed.buffers.update(dict.fromkeys(packet.receivers, self._pool.packed(pieces, capacity)))
            packed.checksums.update(dict.fromkeys(packet.receivers, _checksum(pieces, self._settings.checksum)))
        return packed

    def _post(
        self,
        in_flight: deque[list[_InFlight]],
        buffers: dict[int, Tensor],
        group: dist.ProcessGroup | None,
    ) -> int:
        """Send a buffer to each receiver, after older ones have arrived; return the bytes."""
        while len(in_flight) >= 2 and not self._settings.snapshot:
            self._await_oldest(in_flight)
        posts = [
            _InFlight(receiver, send(buffer.view(torch.uint8), receiver, group), buffer)
            for receiver, buffer in buffers.items()
            if len(buffer)  # ZeRO-3 may leave a rank nothing of a bucket of small tensors
        ]
        in_flight.append(posts)
        return sum(buffer.nbytes for buffer in buffers.values())

    def _await_all(self, in_flight: deque[list[_InFlight]]) -> None:
        while in_flight:
            self._await_oldest(in_flight)

    def _await_oldest(self, in_flight: deque[list[_InFlight]]) -> None:
        arrived = in_flight.popleft()
        for each in arrived:
            self._wait(each.work, (each.receiver,))
        self._pool.give(each.buffer for each in arrived)


@dataclass(frozen=True)
class WeightReceiver:
    """Receives of one rank.

    checksum:  whether to compare what is stored with what was sent.
    wait:      waits for a buffer.
    """

    checksum: bool
    wait: Wait

    def receive(self, channel: SyncChannel, weights: Weights, load: Load, delivered: Tensor | None = None) -> None:
        """Receive into the copy on this rank, then compare checksums. Raises ChecksumError.

        ``weights``: live local parts of the copy. ``delivered``: from ``WeightSender.send``, where this rank has
        loaded the weights itself and nothing is left to receive.
        """
        buckets, sender = channel.plan.buckets, _sender(channel)
        assert (delivered is not None) == (sender == channel.plan.rank), "what this rank loads itself is passed on"
        # what a bucket has become is summed while the next one arrives
        arrived = self._arriving(channel, weights, load) if delivered is None else iter(buckets)
        sums = [_checksum([weights[name] for name in names], self.checksum) for names in arrived]
        if self.checksum:
            stored = torch.stack(sums)
            sent = self._received_checksums(channel, stored) if delivered is None else delivered
            wrong = [names[0] for names, same in zip(buckets, (sent == stored).tolist(), strict=True) if not same]
            if wrong:
                plan = channel.plan
                raise ChecksumError(
                    f"sync weights {plan.source} -> {plan.destination}: rank {plan.rank} holds other weights than "
                    f"rank {sender} sent, in the bucket of {wrong[0]}"
                )

    def _arriving(self, channel: SyncChannel, weights: Weights, load: Load) -> Iterator[Sequence[str]]:
        """Load every bucket, from two buffers by turns; yield its names while the next one arrives."""
        assert channel.plan.receive is not None, "the copy is on this rank"
        buckets, parts = channel.plan.buckets, channel.plan.receive.parts
        sizes = [[parts[name].num_elements for name in names] for names in buckets]
        like = weights[buckets[0][0]]
        buffers = [like.new_empty(max(map(sum, sizes))) for _ in range(min(2, len(buckets)))]

        def post(number: int) -> Waitable | None:
            return self._post(buffers[number % 2][: sum(sizes[number])], channel)

        work = post(0)
        for number, names in enumerate(buckets):
            if work is not None:
                self.wait(work, (_sender(channel),))
            work = post(number + 1) if number + 1 < len(buckets) else None
            values = buffers[number % 2][: sum(sizes[number])].split(sizes[number])
            load(dict(zip(names, values, strict=True)))
            yield names

    def _post(self, buffer: Tensor, channel: SyncChannel) -> Waitable | None:
        if not len(buffer):
            return None
        return receive(buffer.view(torch.uint8), _sender(channel), channel.group)

    def _received_checksums(self, channel: SyncChannel, stored: Tensor) -> Tensor:
        """Return the checksum of each bucket as the sender computed it; ``stored`` has the same shape."""
        sent = torch.empty_like(stored)
        work = self._post(sent, channel)
        assert work is not None, "there is at least one bucket"
        self.wait(work, (_sender(channel),))
        return sent


def _sender(channel: SyncChannel) -> int:
    assert channel.plan.receive is not None, "the copy is on this rank"
    return channel.plan.receive.sender


def _checksum(tensors: Sequence[Tensor], enabled: bool) -> Tensor:
    """Return the checksum of a bucket; 0 where none is compared."""
    return checksum_of(tensors) if enabled else torch.zeros((), dtype=torch.int64)


def _of_buckets(checksums: Sequence[dict[int, Tensor]], rank: int) -> Tensor:
    """Return the checksum of each bucket for ``rank``, int64 (buckets,)."""
    return torch.stack([each[rank] for each in checksums])
