"""Buckets of whole tensors that are gathered together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexrlhf.weights.shards import Parts

GRADIENT_BUCKET_BYTES = 25_000_000
"""Bytes of gradients in one collective; DistributedDataParallel's default."""


def make_buckets(tensor_bytes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Return ranges of tensor indices of at most ``bucket_bytes`` together; a larger tensor is a bucket of its own."""
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


def bucket_names(parts: Parts, item_bytes: int, bucket_bytes: int) -> list[list[str]]:
    """Return the names of each bucket, sorted; sizes are of whole tensors, so that all ranks make the same buckets."""
    names = sorted(parts)
    sizes = [math.prod(parts[name].shape) * item_bytes for name in names]
    return [[names[index] for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]
