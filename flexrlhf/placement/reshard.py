"""Weights from one placed model to another: who sends to whom, in which buckets. comm/sync.py executes it.

Today every rank of a model holds all its weights (replicas), so a destination rank needs one source rank. Sharded
layouts extend ``WeightTransfer`` by the part that is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

CHECKSUM_BYTES = 8
"""One int64 for each bucket."""


@dataclass(frozen=True)
class WeightTransfer:
    source: int
    destination: int


def pair_ranks(source: tuple[int, ...], destination: tuple[int, ...]) -> tuple[WeightTransfer, ...]:
    """Every destination rank gets a source rank; source ranks take turns."""
    return tuple(WeightTransfer(source[i % len(source)], rank) for i, rank in enumerate(destination))


def make_buckets(tensor_bytes: tuple[int, ...], bucket_bytes: int) -> list[range]:
    """Consecutive tensors (by index) of at most ``bucket_bytes`` together; a larger tensor is a bucket of its own."""
    buckets: list[range] = []
    start, size = 0, 0
    for index, item in enumerate(tensor_bytes):
        if index > start and size + item > bucket_bytes:
            buckets.append(range(start, index))
            start, size = index, 0
        size += item
    if tensor_bytes:
        buckets.append(range(start, len(tensor_bytes)))
    return buckets


def sync_bytes(tensor_bytes: tuple[int, ...], bucket_bytes: int, checksum: bool, num_transfers: int) -> int:
    """Bytes that one Sync sends: the weights, and a checksum for each bucket, to every destination rank."""
    buckets = len(make_buckets(tensor_bytes, bucket_bytes))
    return num_transfers * (sum(tensor_bytes) + (CHECKSUM_BYTES * buckets if checksum else 0))
