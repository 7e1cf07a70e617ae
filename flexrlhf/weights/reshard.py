"""Resharding of weights from one placed model to another, for any two layouts: gathers, transfers, buckets.

Bucket by bucket the source's shards are gathered into whole tensors, once, and every destination rank receives its part
in its own dtype. comm/sync.py executes the plan.
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
    """Weights that rank ``source`` sends to rank ``destination``."""

    source: int
    destination: int


def gathering_sets(model: PlacedModel, senders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ``model``'s ranks that gather their shards so that ``senders`` have whole tensors."""
    return tuple(ranks for ranks in model.gather_sets if len(ranks) > 1 and set(ranks) & set(senders))


def pair_ranks(source: tuple[int, ...], destination: tuple[int, ...]) -> tuple[WeightTransfer, ...]:
    """Return a source rank for every destination rank: itself where it is one; else source ranks take turns."""
    return tuple(
        WeightTransfer(rank if rank in source else source[i % len(source)], rank) for i, rank in enumerate(destination)
    )


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


Parts = Mapping[str, Part]
"""Part of each parameter on one rank, by name."""


def bucket_names(parts: Parts, item_bytes: int, bucket_bytes: int) -> list[list[str]]:
    """Return the names of each bucket, sorted; sizes are of whole tensors, so that all ranks make the same buckets."""
    names = sorted(parts)
    sizes = [math.prod(parts[name].shape) * item_bytes for name in names]
    return [[names[index] for index in bucket] for bucket in make_buckets(sizes, bucket_bytes)]


def part_elements(parts: Parts, names: Sequence[str]) -> int:
    """Return the elements of the parts called ``names``."""
    return sum(parts[name].num_elements for name in names)


def trained_parts(model: PlacedModel, shape: ModelShape, rank: int) -> dict[str, Part]:
    """Return the part on ``rank`` of each parameter that training changes, by name."""
    parts = parts_on(model, shape, rank)
    return {name: parts[name] for name, _ in shape_of(model, shape).trained}


def gather_bytes(
    model: PlacedModel, shape: ModelShape, ranks: tuple[int, ...], item_bytes: int, destination: PlacedModel
) -> int:
    """Return the bytes that ``ranks`` send each other to gather the trained weights for ``destination``.

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
    """Return the bytes that cross between ranks in one Sync: gathers, each destination rank's part, checksums."""
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
