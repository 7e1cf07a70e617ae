"""Bytes of weights in transfer: buckets of a Sync on both sides, and the gather of a Save, as comm/ executes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flexrlhf.config.model_settings import DTYPE_BYTES
from flexrlhf.config.spec import SyncSpec
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.expert_files import file_shapes
from flexrlhf.weights.loading import is_read_in_parts
from flexrlhf.weights.model_files import BLOCK_BYTES
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import Parameters
from flexrlhf.weights.saving import SavedFile
from flexrlhf.weights.shards import part_elements
from flexrlhf.weights.sync_volumes import SyncVolumes
from flexrlhf.weights.transfers import NodeOf

UNDER_WAY = "weights under way"
"""Bytes of the buffers of syncs that overlap other work."""


@dataclass(frozen=True)
class WeightSync:
    """A Sync: the trained weights of a placed model go to a copy that follows it.

    overlaps:  whether it overlaps other work.
    wakes:     whether the copy is a rollout engine that slept until now, whose cache is not allocated yet.
    """

    source: ModelName
    destination: ModelName
    overlaps: bool = False
    wakes: bool = False


def sync_parts(
    source: PlacedModel,
    destination: PlacedModel,
    shape: ModelShape,
    settings: SyncSpec,
    rank: int,
    overlaps: bool = False,
    node_of: NodeOf | None = None,
) -> dict[str, int | None]:
    """Return bytes by name on ``rank``: buffers to send and receive, and adapters that are merged.

    The buffers of a Sync that ``overlaps`` have room for all that the trained model's ranks send; ``UNDER_WAY`` are
    they, and they stay.

    A rank is counted as packing for every different part of the destination; of several replicas some pack less.
    """
    item = destination.sent_item_bytes(settings.dtype)
    volumes = SyncVolumes.of(source, destination, shape, node_of)
    sizes = volumes.on(rank, overlaps)
    parts: dict[str, int | None] = {}
    if overlaps:
        parts[UNDER_WAY] = item * (sizes.packed + sizes.first)
        buffered = sizes.sent_on + sizes.received - sizes.first
    else:
        buffered = sizes.packed + sizes.received + sizes.sent_on
    if buffered:
        # in one bucket, or in as many as exist at a time
        parts["buckets"] = min(item * buffered, settings.bucket_bytes)
    if shape.is_merged_in(destination) and rank in source.ranks:
        largest = max(math.prod(size) for _, size in shape.of_copy(destination).trained)
        region = min(largest, settings.bucket_bytes // item)
        gathered = 4 * volumes.merged_on(rank)
        # the base weights of a region in float32, B A, and their sum
        parts["merged"] = 3 * 4 * region
        parts["gathered"] = _gathering(gathered, len(source.shard_set(rank))) or gathered
    return parts


@dataclass(frozen=True)
class Saved:
    """A model as it is saved: the number of its files, and bytes of the largest buckets.

    whole:    of whole parameters.
    experts:  of some experts.
    """

    files: int
    whole: int
    experts: int


def saving_parts(saved: Saved, num_ranks: int) -> dict[str, int | None]:
    """Return bytes by name on each of ``num_ranks``, which gather the trained weights bucket by bucket."""
    return {"gathered": max(_gathering(saved.whole, num_ranks), saved.experts if num_ranks > 1 else 0)}


def saved_model(model: PlacedModel, shape: ModelShape, bucket_bytes: int, shard_bytes: int) -> Saved:
    """Return the files of a model of at most ``shard_bytes``, and their buckets; adapters are in one."""
    family, most = "" if shape.sizes is None else shape.sizes.family, float(shard_bytes)
    if model.settings.lora is not None:
        most = math.inf
    return _saved(family, shape.of_copy(model).trained, _saved_item(model, shape), bucket_bytes, most)


@lru_cache(maxsize=256)
def _saved(family: str, parameters: Parameters, item: int, bucket_bytes: int, shard_bytes: float) -> Saved:
    files = SavedFile.all_of(family, dict(parameters), item, bucket_bytes, shard_bytes)
    buckets = [each for file in files for each in file.buckets]
    whole, experts = (
        [each.size for each in buckets if (each.experts is None) == is_whole] for is_whole in (True, False)
    )
    return Saved(len(files), max(whole, default=0), max(experts, default=0))


def saved_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the bytes of a saved model: all trained weights, whole."""
    return _saved_item(model, shape) * shape.num_trained


def writing_bytes(model: PlacedModel, shape: ModelShape, saved: Saved, num_ranks: int) -> int:
    """Return the host memory of a rank that writes files of a model: one tensor; of adapters all.

    If each of ``num_ranks`` writes, also a bucket, which waits there while the others' are gathered.
    """
    if model.settings.lora is not None:
        return saved_bytes(model, shape)
    bucket = max(saved.whole, saved.experts) if saved.files > 1 and num_ranks > 1 else 0
    return bucket + _saved_item(model, shape) * _largest_in_files(
        "" if shape.sizes is None else shape.sizes.family, shape.trained
    )


@lru_cache(maxsize=256)
def _largest_in_files(family: str, parameters: Parameters) -> int:
    return max(map(math.prod, file_shapes(family, dict(parameters)).values()), default=0)


@lru_cache(maxsize=256)
def _largest_tensor(parameters: Parameters) -> int:
    return max((math.prod(size) for _, size in parameters), default=0)


def is_loaded_whole(model: PlacedModel, shape: ModelShape) -> bool:
    """Whether every rank loads all of a model, in float32, before it is sharded; vLLM may."""
    family = "" if shape.sizes is None else shape.sizes.family
    return model.facts.loads_whole or not is_read_in_parts(model.settings, family)


def loading_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the host memory of a rank while a model is loaded, without the part of it that the rank stores.

    A block of a file at a time is read into the part; ZeRO-3 makes one tensor at a time before it partitions it.
    """
    if is_loaded_whole(model, shape):
        return 4 * shape.num_parameters
    largest = _largest_tensor(shape.parameters)
    block = min(BLOCK_BYTES, 4 * largest)
    return block + (model.item_bytes * largest if model.facts.split(model.settings.zero) == "flat" else 0)


def copied_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the host memory of the pieces of ``model`` that ``rank`` copies for a checkpoint.

    That is float32 weights and moments of a trained model, of a copy that follows it the weights alone. Ranks that
    store the same take turns.
    """
    parts = shape.trained_parts(model, rank)
    if not model.trained:
        return model.item_bytes * part_elements(parts, sorted(shape.written_names(model, rank)))
    settings = model.settings
    item = 4 * (1 + settings.optimizer.num_moments)
    if settings.zero in (1, 2) and model.facts.split(settings.zero) == "whole":
        # each replica copies the elements that it updates
        return item * -(-part_elements(parts, list(parts)) // model.layout.of_weights.dp)
    return item * part_elements(parts, sorted(shape.written_names(model, rank)))


def _saved_item(model: PlacedModel, shape: ModelShape) -> int:
    return DTYPE_BYTES[shape.saved_type(model)]


def _gathering(bucket: int, num_ranks: int) -> int:
    """Return the bytes of one gather: the bucket as it arrives and as whole tensors, the rank's own part sent and
    padded.
    """
    return 2 * bucket + 2 * -(-bucket // num_ranks) if num_ranks > 1 else 0
