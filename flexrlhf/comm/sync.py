"""Execute a Sync: weights of a trained model to its shadow, in buckets, with a checksum taken on both sides.

The source sends flat buckets (copies, so training may go on) and a checksum of each; the destination loads them and
checks what it then holds. Without ``snapshot`` the source keeps at most two buckets in memory and so waits for the
destination; with it all are copied at once and nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexrlhf.comm.world import Wait, posted
from flexrlhf.placement.reshard import make_buckets
from flexrlhf.spec import SyncSpec
from flexrlhf.strategies.instructions import Sync

Weights = dict[str, Tensor]


class ChecksumError(RuntimeError):
    """The destination of a Sync does not hold what the source sent."""


@dataclass(frozen=True)
class Buckets:
    """Weights in order of their names, cut into buckets."""

    weights: Weights
    bucket_bytes: int

    @property
    def names(self) -> list[str]:
        return sorted(self.weights)

    def ranges(self) -> list[range]:
        return make_buckets(tuple(self.weights[name].nbytes for name in self.names), self.bucket_bytes)

    def members(self, bucket: range) -> list[Tensor]:
        names = self.names
        return [self.weights[names[i]] for i in bucket]

    def flat(self, bucket: range) -> Tensor:
        """A copy of the bucket's weights as one vector of bytes."""
        return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in self.members(bucket)])

    def split(self, buffer: Tensor, bucket: range) -> dict[str, Tensor]:
        names, start, parts = self.names, 0, {}
        for i in bucket:
            like = self.weights[names[i]]
            parts[names[i]] = buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += like.nbytes
        return parts

    def checksum(self, bucket: range) -> Tensor:
        """Sum of the weights' bits as integers: cheap, and different for nearly every change. int64."""
        return torch.stack(
            [t.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for t in self.members(bucket)]
        ).sum()


@dataclass(frozen=True)
class _Flight:
    """One bucket on its way to all receivers; the buffer must live as long."""

    receivers: list[int]
    works: list[dist.Work]
    buffer: Tensor


class Syncer:
    """Syncs weights for one rank."""

    def __init__(self, rank: int, settings: SyncSpec, bucket_bytes: int, wait: Wait) -> None:
        self._rank = rank
        self._settings = settings
        self._bucket_bytes = bucket_bytes
        self._wait = wait
        self._flying: dict[str, deque[_Flight]] = {}

    def send(self, sync: Sync, weights: Weights, group: dist.ProcessGroup) -> int:
        """Send to every destination that the plan gives this rank. Returns the bytes sent."""
        receivers = [t.destination for t in sync.transfers if t.source == self._rank]
        if not receivers:
            return 0
        flying = self._flying.setdefault(sync.source, deque())
        self._land_all(flying)
        sent = 0
        for buffer in self._outgoing(Buckets(weights, self._bucket_bytes)):
            while len(flying) >= 2 and not self._settings.snapshot:
                self._land(flying)
            works = [posted(dist.isend(buffer, rank, group=group)) for rank in receivers]
            flying.append(_Flight(receivers, works, buffer))
            sent += buffer.nbytes * len(receivers)
        return sent

    def receive(self, sync: Sync, weights: Weights, load: Callable[[Weights], None], group: dist.ProcessGroup) -> None:
        """Receive into the shadow. ``weights`` are its current ones; ``load`` overwrites those that it is given."""
        source = next(t.source for t in sync.transfers if t.destination == self._rank)
        buckets = Buckets(weights, self._bucket_bytes)
        device = next(iter(weights.values())).device
        for bucket in buckets.ranges():
            buffer = torch.empty(sum(t.nbytes for t in buckets.members(bucket)), dtype=torch.uint8, device=device)
            self._receive(buffer, source, group)
            load(buckets.split(buffer, bucket))
        if self._settings.checksum:
            self._check(sync, buckets, source, group, device)

    def close(self) -> None:
        """Await all sends that are under way."""
        for flying in self._flying.values():
            self._land_all(flying)

    def _outgoing(self, buckets: Buckets) -> Iterator[Tensor]:
        """The buckets, then their checksums as one vector; all copied at once for a snapshot."""
        flats = (buckets.flat(bucket) for bucket in buckets.ranges())
        yield from list(flats) if self._settings.snapshot else flats
        if self._settings.checksum:
            yield torch.stack([buckets.checksum(bucket) for bucket in buckets.ranges()])

    def _land_all(self, flying: deque[_Flight]) -> None:
        while flying:
            self._land(flying)

    def _land(self, flying: deque[_Flight]) -> None:
        flight = flying.popleft()
        for receiver, work in zip(flight.receivers, flight.works, strict=True):
            self._wait(work, (receiver,))

    def _receive(self, buffer: Tensor, source: int, group: dist.ProcessGroup) -> None:
        self._wait(posted(dist.irecv(buffer, source, group=group)), (source,))

    def _check(self, sync: Sync, buckets: Buckets, source: int, group: dist.ProcessGroup, device: torch.device) -> None:
        ranges = buckets.ranges()
        expected = torch.empty(len(ranges), dtype=torch.int64, device=device)
        self._receive(expected, source, group)
        for i, bucket in enumerate(ranges):
            if expected[i] != buckets.checksum(bucket):
                name = buckets.names[bucket[0]]
                raise ChecksumError(
                    f"sync {sync.label}: rank {self._rank} holds other weights than rank {source} sent, "
                    f"in the bucket of {name}"
                )
