"""Bytes of weights in transfer: buckets of a Sync on both sides, and the gather of a Save, as comm/ executes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexrlhf.config.spec import SyncSpec
from flexrlhf.memory.states import item_bytes, num_moments
from flexrlhf.placement.names import ModelName
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.loading import is_read_in_parts
from flexrlhf.weights.lora import gathered_names, is_merged
from flexrlhf.weights.model_files import BLOCK_BYTES
from flexrlhf.weights.pieces import written_names
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
"""Buckets that exist at a time: two in flight while a third is packed."""


@dataclass(frozen=True)
class WeightSync:
    """A Sync: the trained weights of a placed model go to a copy that follows it."""

    source: ModelName
    destination: ModelName
    transfers: tuple[WeightTransfer, ...]


def sync_parts(
    work: WeightSync, source: PlacedModel, destination: PlacedModel, shape: ModelShape, settings: SyncSpec, rank: int
) -> dict[str, int | None]:
    """Return bytes by name on ``rank``: a sender, a receiver, or one that only gathers."""
    item = item_bytes(destination)
    arriving = trained_parts(destination, shape, work.transfers[0].destination)
    buckets = bucket_names(arriving, item, settings.bucket_bytes)
    parts: dict[str, int | None] = {}
    if rank in source.ranks:
        # a bucket for the rank itself is copied from tensor to tensor
        receivers = [t.destination for t in work.transfers if t.source == rank != t.destination]
        distinct = [dict(each) for each in {tuple(trained_parts(destination, shape, r).items()) for r in receivers}]
        sizes = [item * sum(part_elements(each, names) for each in distinct) for names in buckets]
        sets = gathering_sets(source, [transfer.source for transfer in work.transfers])
        members = next((ranks for ranks in sets if rank in ranks), (rank,))
        parts["buckets"] = sum(sizes if settings.snapshot else sorted(sizes)[-NUM_BUCKETS:])
        largest = item * _largest(arriving, buckets)
        if is_merged(destination, shape):
            merged = largest
            largest = 4 * _largest(parts_on(source, shape, rank), [gathered_names(names) for names in buckets])
            # without a gather the base weights are cast to float32
            parts["merged"] = merged + (largest if len(members) == 1 and item_bytes(source) < 4 else 0)
        parts["gathered"] = _gathering(largest, len(members))
    if any(transfer.destination == rank != transfer.source for transfer in work.transfers):
        # one is loaded while the next one arrives
        mine = trained_parts(destination, shape, rank)
        parts["buckets"] = 2 * item * max(part_elements(mine, names) for names in buckets)
    return parts


def saving_parts(
    model: PlacedModel, shape: ModelShape, ranks: tuple[int, ...], settings: SyncSpec
) -> dict[str, int | None]:
    """Return bytes by name on each of ``ranks``, which gather the trained weights bucket by bucket."""
    item, parts = _saved_item(model), trained_parts(model, shape, ranks[0])
    buckets = bucket_names(parts, item, settings.bucket_bytes)
    return {"gathered": _gathering(item * _largest(parts, buckets), len(ranks))}


def saved_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the bytes of a saved model: all trained weights, whole."""
    return _saved_item(model) * count_elements(shape.trained)


def writing_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the host memory of the rank that writes a model: one tensor; of adapters all."""
    if model.settings.lora is not None:
        return saved_bytes(model, shape)
    return _saved_item(model) * max((math.prod(size) for _, size in shape.trained), default=0)


def is_loaded_whole(model: PlacedModel, shape: ModelShape) -> bool:
    """Whether every rank loads all of a model, in float32, before it is sharded; a rollout engine may."""
    family = "" if shape.sizes is None else shape.sizes.family
    return model.rollout is not None or not is_read_in_parts(model.settings, family)


def loading_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the host memory of a rank while a model is loaded, without the part of it that the rank stores.

    A block of a file at a time is read into the part; ZeRO-3 makes one tensor at a time before it partitions it.
    """
    if is_loaded_whole(model, shape):
        return 4 * count_elements(shape.parameters)
    largest = max((math.prod(size) for _, size in shape.parameters), default=0)
    block = min(BLOCK_BYTES, 4 * largest)
    return block + (item_bytes(model) * largest if (model.engine, model.settings.zero) == ("deepspeed", 3) else 0)


def copied_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the host memory of what ``rank`` copies of ``model`` for a checkpoint.

    That is float32 weights and moments of a trained model, of a copy that follows it the weights alone. Ranks that
    store the same take turns.
    """
    parts = trained_parts(model, shape, rank)
    if not model.trained:
        return item_bytes(model) * part_elements(parts, sorted(written_names(model, shape, rank)))
    settings = model.settings
    item = 4 * (1 + num_moments(settings.optimizer))
    if model.engine == "deepspeed" and settings.zero in (1, 2):
        return item * -(-part_elements(parts, list(parts)) // model.layout.dp)
    return item * part_elements(parts, sorted(written_names(model, shape, rank)))


def _saved_item(model: PlacedModel) -> int:
    """Return the bytes of a saved number: float32 master weights where the engine exposes them."""
    return item_bytes(model) if model.engine == "deepspeed" else 4


def _largest(parts: Parts, buckets: Sequence[Sequence[str]]) -> int:
    """Return the elements of the largest bucket of whole tensors."""
    return max(sum(math.prod(parts[name].shape) for name in names) for names in buckets)


def _gathering(bucket: int, num_ranks: int) -> int:
    """Return the bytes of one gather: the bucket as it arrives and as whole tensors, the rank's own part sent and
    padded.
    """
    return 2 * bucket + 2 * -(-bucket // num_ranks) if num_ranks > 1 else 0
