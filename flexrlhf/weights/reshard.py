"""Weights from one placed model to another, whatever their layouts: who gathers, who sends to whom, in which buckets.

Bucket by bucket the source's shards are gathered into whole tensors, once, and every destination rank is sent the part
that it holds, in the type that it holds it in. comm/sync.py executes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.lora import gathered_names, is_merged, shape_of
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape
from flexrlhf.weights.shards import Part, parts_on

CHECKSUM_BYTES = 8
"""One int64 for each bucket."""


@dataclass(frozen=True)
class WeightTransfer:
    source: int
    destination: int


def gathering_sets(model: PlacedModel, senders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The sets of ``model``'s ranks that put their shards together so that ``senders`` have whole tensors."""
    return tuple(ranks for ranks in model.gather_sets if len(ranks) > 1 and set(ranks) & set(senders))


def pair_ranks(source: tuple[int, ...], destination: tuple[int, ...]) -> tuple[WeightTransfer, ...]:
    """Every destination rank gets a source rank: itself where it is one; else source ranks take turns."""
    return tuple(
        WeightTransfer(rank if rank in source else source[i % len(source)], rank) for i, rank in enumerate(destination)
    )


def make_buckets(tensor_bytes: Sequence[int], bucket_bytes: int) -> list[range]:
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


Parts = Mapping[str, Part]


def bucket_names(parts: Parts, item_bytes: int, bucket_bytes: int) -> list[list[str]]:
    """The names of each bucket, in sorted order; a bucket counts whole tensors, so that all ranks cut alike."""
    names = sorted(parts)
    sizes = [math.prod(parts[name].shape) * item_bytes for name in names]
    return [[names[index] for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]


def part_elements(parts: Parts, names: Sequence[str]) -> int:
    return sum(parts[name].num_elements for name in names)


def trained_parts(model: PlacedModel, shape: ModelShape, rank: int) -> dict[str, Part]:
    """What ``rank`` holds of the weights that training changes."""
    parts = parts_on(model, shape, rank)
    return {name: parts[name] for name, _ in shape_of(model, shape).trained}


def gather_bytes(
    model: PlacedModel, shape: ModelShape, ranks: tuple[int, ...], item_bytes: int, destination: PlacedModel
) -> int:
    """Bytes that ``ranks`` send each other when they gather the trained weights for ``destination``.

    Every rank sends its part of each bucket, padded to the largest, which is the first one's, to every other. Merged
    weights are gathered in float32, with the adapters that change them, since the sum is rounded only once.
    """
    names = [name for name, _ in shape_of(destination, shape).trained]
    if is_merged(destination, shape):
        names, item_bytes = gathered_names(names), 4
    longest = part_elements(parts_on(model, shape, ranks[0]), names)
    return len(ranks) * (len(ranks) - 1) * item_bytes * longest


def sync_bytes(
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    transfers: Sequence[WeightTransfer],
    bucket_bytes: int,
    checksum: bool,
) -> int:
    """Bytes that cross between ranks in one Sync: the gathers, each destination rank's part, a checksum per bucket."""
    item_bytes = DTYPE_BYTES[destination.settings.dtype]
    sets = gathering_sets(source, [t.source for t in transfers])
    total = sum(gather_bytes(source, shape, ranks, item_bytes, destination) for ranks in sets)
    for transfer in transfers:
        if transfer.source == transfer.destination:
            continue
        parts = trained_parts(destination, shape, transfer.destination)
        total += item_bytes * part_elements(parts, list(parts))
        total += CHECKSUM_BYTES * len(bucket_names(parts, item_bytes, bucket_bytes)) if checksum else 0
    return total
