"""Bytes of weights on their way: buckets of a Sync on both sides, and the gathering of a Save. As comm/ does it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexrlhf.config.spec import SyncSpec
from flexrlhf.memory.states import item_bytes
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.lora import gathered_names, is_merged
from flexrlhf.weights.reshard import (
    Parts,
    WeightTransfer,
    bucket_names,
    gathering_sets,
    part_elements,
    trained_parts,
)
from flexrlhf.weights.shapes import ModelShape, count_elements
from flexrlhf.weights.shards import parts_on

NUM_BUCKETS = 3
"""Two that travel while a third is made."""


@dataclass(frozen=True)
class WeightSync:
    """Trained weights of a placed model to another that follows it."""

    source: ModelName
    destination: ModelName
    transfers: tuple[WeightTransfer, ...]


def sync_parts(
    work: WeightSync, source: PlacedModel, destination: PlacedModel, shape: ModelShape, settings: SyncSpec, rank: int
) -> dict[str, int | None]:
    """Name → bytes on ``rank``, a sender, a receiver, or one that only helps to gather."""
    item = item_bytes(destination)
    arriving = trained_parts(destination, shape, work.transfers[0].destination)
    buckets = bucket_names(arriving, item, _bucket_bytes(settings))
    parts: dict[str, int | None] = {}
    if rank in source.ranks:
        # a bucket for the rank itself goes from tensor to tensor
        receivers = [t.destination for t in work.transfers if t.source == rank != t.destination]
        held = [dict(each) for each in {tuple(trained_parts(destination, shape, r).items()) for r in receivers}]
        sizes = [item * sum(part_elements(each, names) for each in held) for names in buckets]
        sets = gathering_sets(source, [transfer.source for transfer in work.transfers])
        members = next((ranks for ranks in sets if rank in ranks), (rank,))
        parts["buckets"] = sum(sizes if settings.snapshot else sorted(sizes)[-NUM_BUCKETS:])
        largest = item * _largest(arriving, buckets)
        if is_merged(destination, shape):
            merged = largest
            largest = 4 * _largest(parts_on(source, shape, rank), [gathered_names(names) for names in buckets])
            # what is not gathered is widened
            parts["merged"] = merged + (largest if len(members) == 1 and item_bytes(source) < 4 else 0)
        parts["gathered"] = _gathering(largest, len(members))
    if any(transfer.destination == rank != transfer.source for transfer in work.transfers):
        # one that is loaded while the next one arrives
        mine = trained_parts(destination, shape, rank)
        parts["buckets"] = 2 * item * max(part_elements(mine, names) for names in buckets)
    return parts


def saving_parts(
    model: PlacedModel, shape: ModelShape, ranks: tuple[int, ...], settings: SyncSpec
) -> dict[str, int | None]:
    """Name → bytes on each of ``ranks``, which make the trained weights whole bucket by bucket."""
    item, parts = _saved_item(model), trained_parts(model, shape, ranks[0])
    buckets = bucket_names(parts, item, _bucket_bytes(settings))
    return {"gathered": _gathering(item * _largest(parts, buckets), len(ranks))}


def saved_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Host memory for all trained weights, whole."""
    return _saved_item(model) * count_elements(shape.trained)


def _saved_item(model: PlacedModel) -> int:
    """Float32 master weights where the engine hands them out."""
    return item_bytes(model) if model.engine == "deepspeed" else 4


def _bucket_bytes(settings: SyncSpec) -> int:
    return int(settings.bucket_mb * 1e6)


def _largest(parts: Parts, buckets: Sequence[Sequence[str]]) -> int:
    """Elements of the largest bucket of whole tensors."""
    return max(sum(math.prod(parts[name].shape) for name in names) for names in buckets)


def _gathering(bucket: int, num_ranks: int) -> int:
    """A bucket as it arrives from all ranks and as whole tensors, and a rank's own part of it as sent, and padded."""
    return 2 * bucket + 2 * -(-bucket // num_ranks) if num_ranks > 1 else 0
