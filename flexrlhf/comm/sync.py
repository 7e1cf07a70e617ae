"""Execute a Sync: weights of a trained model to a copy of it, in buckets, with a checksum taken on both sides.

For each bucket the source's ranks put their shards together; a sender cuts what each of its destination ranks holds
and sends copies, so training may go on. The destination loads them and checks what it then holds. Without ``snapshot``
the source keeps at most two buckets in memory and so waits for the destination; with it all are copied at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.buffers import BufferPool
from flexrlhf.comm.checksum import checksum_of
from flexrlhf.comm.weights import Gather, Weights, cut
from flexrlhf.comm.world import Wait, posted
from flexrlhf.config.spec import LoraSpec, SyncSpec
from flexrlhf.errors import RunStopped
from flexrlhf.strategies.instructions import Sync
from flexrlhf.weights.lora import gathered_names, merged_from
from flexrlhf.weights.reshard import Parts, bucket_names, part_elements
from flexrlhf.weights.shards import Part


class ChecksumError(RunStopped):
    """The destination of a Sync does not hold what the source sent."""


@dataclass(frozen=True)
class Source:
    """A trained model on this rank: its local weights, and how the ranks beside it make them whole.

    ``merge``: its adapters, which the destination wants inside the weights that they change.
    """

    weights: Weights
    gather: Gather
    merge: LoraSpec | None = None

    def whole(self, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors ``names`` of the destination, whole. A collective of the ranks that hold them together."""
        if self.merge is None:
            return self.gather.whole(self.weights, names, dtype)
        tensors = self.gather.whole(self.weights, gathered_names(names), torch.float32)
        return {name: _merged(self.merge, *(tensors[part] for part in merged_from(name))).to(dtype) for name in names}

    def bytes_sent(self, names: Sequence[str], item_bytes: int) -> int:
        """Bytes that this rank hands to the others for that."""
        if self.merge is None:
            return self.gather.bytes_sent(names, item_bytes)
        return self.gather.bytes_sent(gathered_names(names), 4)


def _merged(lora: LoraSpec, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + alpha / rank * B A (Hu et al. 2022, sec. 4.1)."""
    return base + lora.alpha / lora.rank * (b @ a)


@dataclass(frozen=True)
class Destination:
    """The copy that follows: the type of its weights, and what each of its ranks holds of them."""

    dtype: torch.dtype
    parts: Mapping[int, Parts]

    def buckets(self, bucket_bytes: int) -> list[list[str]]:
        return bucket_names(next(iter(self.parts.values())), self.dtype.itemsize, bucket_bytes)

    def longest(self, buckets: Sequence[Sequence[str]], receivers: Sequence[int]) -> int:
        """Numbers of the longest buffer that one of ``receivers`` gets."""
        return max((part_elements(self.parts[rank], names) for rank in receivers for names in buckets), default=0)


@dataclass(frozen=True)
class _Flight:
    """One buffer on its way to a receiver; it must live as long."""

    receiver: int
    work: dist.Work
    buffer: Tensor


Load = Callable[[dict[str, Tensor]], None]
"""Overwrites the named weights of a destination on this rank with vectors of what it holds of them."""


class Syncer:
    """Syncs weights for one rank."""

    def __init__(self, rank: int, settings: SyncSpec, bucket_bytes: int, wait: Wait) -> None:
        self._rank = rank
        self._settings = settings
        self._bucket_bytes = bucket_bytes
        self._wait = wait
        self._flying: dict[str, deque[list[_Flight]]] = {}
        self._delivered: dict[str, Tensor] = {}
        self._spare = BufferPool()

    def send(
        self, sync: Sync, source: Source, destination: Destination, group: dist.ProcessGroup | None, load: Load | None
    ) -> int:
        """Gather with the source's ranks and send to every rank that the plan gives this one. Returns the bytes.

        ``load``: of the destination on this rank itself, which gets its weights without a copy on the way.
        """
        receivers = [t.destination for t in sync.transfers if t.source == self._rank]
        if not receivers and source.gather.group is None:
            return 0
        flying = self._flying.setdefault(sync.source, deque())
        self._land_all(flying)
        buckets = destination.buckets(self._bucket_bytes)
        sent = sum(source.bytes_sent(names, destination.dtype.itemsize) for names in buckets)
        for buffers in self._outgoing(sync, source, destination, buckets, receivers, load):
            while len(flying) >= 2 and not self._settings.snapshot:
                self._land(flying)
            flying.append([self._post(receiver, buffer, group) for receiver, buffer in buffers if len(buffer)])
            sent += sum(buffer.nbytes for _, buffer in buffers)
        if self._settings.snapshot:
            self._spare.clear()
        return sent

    def receive(self, sync: Sync, weights: Weights, parts: Parts, load: Load, group: dist.ProcessGroup | None) -> None:
        """Receive into the destination, unless this rank has delivered to itself; then compare checksums.

        ``weights``: its live local ones.
        """
        source = next(t.source for t in sync.transfers if t.destination == self._rank)
        like = next(iter(weights.values()))
        buckets = bucket_names(parts, like.element_size(), self._bucket_bytes)
        arriving = self._arriving(buckets, parts, like, load, source, group) if source != self._rank else iter(buckets)
        # what a bucket has become is summed while the next one arrives
        sums = [self._sum_of([weights[name] for name in names]) for names in arriving]
        if self._settings.checksum:
            held = torch.stack(sums)
            self._check(sync, buckets, held, self._expected(sync, held, source, group), source)

    def close(self) -> None:
        """Await all sends that are under way."""
        for flying in self._flying.values():
            self._land_all(flying)

    def _outgoing(
        self,
        sync: Sync,
        source: Source,
        destination: Destination,
        buckets: Sequence[Sequence[str]],
        receivers: Sequence[int],
        load: Load | None,
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """For each bucket a buffer for every receiver, then their checksums; all copied at once for a snapshot."""
        sums: dict[int, list[Tensor]] = {receiver: [] for receiver in receivers}
        others = [receiver for receiver in receivers if receiver != self._rank]
        self._spare.capacity = destination.longest(buckets, others)

        def copies() -> Iterator[list[tuple[int, Tensor]]]:
            for names in buckets:
                tensors = source.whole(names, destination.dtype)
                if self._rank in receivers:
                    assert load is not None, "this rank holds the destination"
                    sums[self._rank].append(self._deliver(tensors, destination.parts[self._rank], names, load))
                packed: list[tuple[int, Tensor]] = []
                for pieces, sharing in _cut_for(others, tensors, destination, names):
                    buffer, same = self._spare.packed(pieces), self._sum_of(pieces)
                    for receiver in sharing:
                        packed.append((receiver, buffer))
                        sums[receiver].append(same)
                yield packed

        yield from list(copies()) if self._settings.snapshot else copies()
        if self._rank in receivers:
            self._delivered[sync.destination] = torch.stack(sums.pop(self._rank))
        if self._settings.checksum and others:
            yield [(receiver, torch.stack(sums[receiver])) for receiver in others]

    def _deliver(self, tensors: Weights, parts: Parts, names: Sequence[str], load: Load) -> Tensor:
        """Hand over what this rank holds of a bucket; no buffer lies between. Returns the checksum of the bucket."""
        pieces = {name: cut(tensors[name], parts[name]) for name in names}
        load(pieces)
        return self._sum_of(list(pieces.values()))

    def _sum_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The checksum of a bucket; 0 where nobody looks."""
        return checksum_of(tensors) if self._settings.checksum else torch.zeros((), dtype=torch.int64)

    def _post(self, receiver: int, buffer: Tensor, group: dist.ProcessGroup | None) -> _Flight:
        return _Flight(receiver, posted(dist.isend(buffer.view(torch.uint8), receiver, group=group)), buffer)

    def _land_all(self, flying: deque[list[_Flight]]) -> None:
        while flying:
            self._land(flying)

    def _land(self, flying: deque[list[_Flight]]) -> None:
        landed = flying.popleft()
        for flight in landed:
            self._wait(flight.work, (flight.receiver,))
        self._spare.give(flight.buffer for flight in landed)

    def _arriving(
        self,
        buckets: Sequence[Sequence[str]],
        parts: Parts,
        like: Tensor,
        load: Load,
        source: int,
        group: dist.ProcessGroup | None,
    ) -> Iterator[Sequence[str]]:
        """Load every bucket, in two buffers by turns; yields its names while the next one arrives."""
        sizes = [[parts[name].num_elements for name in names] for names in buckets]
        buffers = [like.new_empty(max(map(sum, sizes))) for _ in range(min(2, len(buckets)))]

        def post(number: int) -> dist.Work | None:
            return self._post_receive(buffers[number % 2][: sum(sizes[number])], source, group)

        work = post(0)
        for number, names in enumerate(buckets):
            if work is not None:
                self._wait(work, (source,))
            work = post(number + 1) if number + 1 < len(buckets) else None
            values = buffers[number % 2][: sum(sizes[number])].split(sizes[number])
            load(dict(zip(names, values, strict=True)))
            yield names

    def _post_receive(self, buffer: Tensor, source: int, group: dist.ProcessGroup | None) -> dist.Work | None:
        if not len(buffer):
            return None  # ZeRO-3 may leave a rank nothing of a bucket of small tensors
        return posted(dist.irecv(buffer.view(torch.uint8), source, group=group))

    def _expected(self, sync: Sync, held: Tensor, source: int, group: dist.ProcessGroup | None) -> Tensor:
        """The checksums of what the source sent."""
        if source == self._rank:
            return self._delivered.pop(sync.destination)
        expected = torch.empty_like(held)
        arriving = self._post_receive(expected, source, group)
        assert arriving is not None, "there is at least one bucket"
        self._wait(arriving, (source,))
        return expected

    def _check(self, sync: Sync, buckets: Sequence[Sequence[str]], held: Tensor, expected: Tensor, source: int) -> None:
        wrong = [names[0] for names, same in zip(buckets, (expected == held).tolist(), strict=True) if not same]
        if wrong:
            raise ChecksumError(
                f"sync {sync.label}: rank {self._rank} holds other weights than rank {source} sent, "
                f"in the bucket of {wrong[0]}"
            )


def _cut_for(
    receivers: Sequence[int], tensors: Weights, destination: Destination, names: Sequence[str]
) -> list[tuple[list[Tensor], list[int]]]:
    """What each receiver holds of a bucket, as vectors, with all the receivers that hold the same."""
    made: list[tuple[list[Part], list[int]]] = []
    for receiver in receivers:
        wanted = [destination.parts[receiver][name] for name in names]
        sharing = next((sharing for held, sharing in made if held == wanted), None)
        if sharing is None:
            made.append((wanted, [receiver]))
        else:
            sharing.append(receiver)
    return [([cut(tensors[n], part) for n, part in zip(names, held, strict=True)], sharing) for held, sharing in made]
