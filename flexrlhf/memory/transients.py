"""Transient bytes of sharding and updating, in addition to the state, during a pass or an optimizer step.

FSDP2 gathers the embeddings and the head as one unit and each layer as another; ZeRO-3 gathers tensor by tensor, ahead
of their use. The factors were counted on the live tensors of torch 2.13 and DeepSpeed 0.19.8, and are upper bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from flexrlhf.config.spec import ModelSpec
from flexrlhf.memory.states import deepspeed_elements, is_bf16_optimizer, item_bytes, sliced_elements
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.buckets import GRADIENT_BUCKET_BYTES
from flexrlhf.weights.shapes import LANGUAGE_HEAD, ModelShape, Parameters
from flexrlhf.weights.stages import shape_of_stage

UNREDUCED_BYTES = 12
"""Per element of a unit while its gradients are scattered: as computed, as summands in float32, and the sums."""


@dataclass(frozen=True)
class Units:
    """Elements that a rank computes with.

    total:    of all weights.
    root:     outside layers.
    layer:    of the largest layer.
    largest:  of the largest tensor.
    head:     of the language head.
    """

    total: int
    root: int
    layer: int
    largest: int
    head: int


def all_units(model: PlacedModel, shape: ModelShape, rank: int) -> Units:
    """Return the units of all parameters of the stage on ``rank``."""
    return _units(model, _stage(model, shape, rank).parameters, rank)


def trained_units(model: PlacedModel, shape: ModelShape, rank: int) -> Units:
    """Return the units of the trained parameters of the stage on ``rank``."""
    return _units(model, _stage(model, shape, rank).trained, rank)


def _stage(model: PlacedModel, shape: ModelShape, rank: int) -> ModelShape:
    return shape_of_stage(shape, model.layout.stage(rank), model.layout.pp)


def _units(model: PlacedModel, parameters: Parameters, rank: int) -> Units:
    """Return units from a cache: they depend on few settings, and plans need them for many models that share these."""
    layout = Layout(tuple(range(model.layout.tp)), model.layout.tp)
    bare = PlacedModel(ModelName(model.role), layout, trained=False, rollout=model.rollout, head=model.head)
    if model.engine == "megatron":
        bare, parameters = replace(bare, settings=_MEGATRON), with_fused_layers(parameters)
    return _units_of(bare, parameters, model.layout.tp_index(rank))


_MEGATRON = ModelSpec(engine="megatron")
_FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linear layers that Megatron-Core has in one with another: query, key and value; gate and up."""


@lru_cache(maxsize=256)
def with_fused_layers(parameters: Parameters) -> Parameters:
    """Return ``parameters`` with those that Megatron-Core has in one tensor as one, called by the first of them."""
    fused: dict[str, tuple[int, ...]] = {}
    for name, size in parameters:
        path, _, kind = name.rpartition(".")
        module = path.rpartition(".")[2]
        first = f"{path.removesuffix(module)}{_FUSED[module]}.{kind}" if module in _FUSED else name
        rows = fused[first][0] if first in fused else 0
        fused[first] = (rows + size[0], *size[1:])
    return tuple(sorted(fused.items()))


@lru_cache(maxsize=256)
def _units_of(model: PlacedModel, parameters: Parameters, rank: int) -> Units:
    root, layer = _root_and_layer(parameters)
    head = _head(parameters) if model.head != "scalar" else ()
    total, outside, largest_layer, head_elements = (
        sliced_elements(model, part, rank) for part in (parameters, root, layer, head)
    )
    largest = max((sliced_elements(model, (item,), rank) for item in {*_largest(root), *_largest(layer)}), default=0)
    return Units(total, outside, largest_layer, largest, head_elements)


def _largest(parameters: Parameters) -> Parameters:
    return tuple(sorted(parameters, key=lambda item: math.prod(item[1]))[-1:])


def _head(parameters: Parameters) -> Parameters:
    """Return the language head; tied weights are those of the embedding."""
    found = dict(parameters)
    name = LANGUAGE_HEAD if LANGUAGE_HEAD in found else "model.embed_tokens.weight"
    return ((name, found[name]),) if name in found else ()


@lru_cache(maxsize=256)
def _root_and_layer(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return parameters outside layers, and those of the largest layer. A layer has a number in its name."""
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, size in parameters:
        words = name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), None)
        layers["" if number is None else ".".join(words[: number + 1])].append((name, size))
    root = tuple(layers.pop("", ()))
    sizes = {name: sum(math.prod(size) for _, size in members) for name, members in layers.items()}
    return root, tuple(layers[max(sizes, key=lambda name: sizes[name])]) if sizes else ()


def gathered_bytes(model: PlacedModel, shape: ModelShape, rank: int, activations: int = 0) -> int:
    """Return the peak bytes of gathered weights of other ranks during a pass; 0 where every rank stores all.

    ``activations``: bytes that do not exist yet while the first unit arrives.
    """
    if model.split == "whole":
        return 0
    units, item = all_units(model, shape, rank), item_bytes(model)
    if model.engine == "deepspeed":
        return item * _zero3_gathered(model, units)
    # a unit arrives in one buffer and is copied from there; float32 shards are sent as a 16-bit copy
    cast = model.num_shards if model.trained and item < 4 else 0
    at_first = 2 * units.root + 2 * units.layer + (units.root // cast if cast else 0)
    later = units.root + 3 * units.layer if model.settings.zero == 3 else units.total + 2 * units.layer
    return max(item * (later + (units.layer // cast if cast else 0)), item * at_first - activations)


def _zero3_gathered(model: PlacedModel, units: Units) -> int:
    """Return elements. A tensor needed again within the reuse distance stays: half of that distance at the turn to
    backward.
    """
    ahead = min(units.total, deepspeed_elements(model.settings, "stage3_prefetch_bucket_size"))
    reused = deepspeed_elements(model.settings, "stage3_max_reuse_distance") // 2 if model.trained else 0
    # prefetched tensors arrive in one buffer and are copied from there
    return min(units.total, reused + ahead + 2 * units.largest) + ahead


def new_gradient_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the bytes of a micro-batch's gradients before they are added to the mini-batch's."""
    trained = trained_units(model, shape, rank)
    item = item_bytes(model)
    # the head sums its gradient in float32 and casts it; other tensors' are computed in their type, and then cast
    cast = 4 + (item if item < 4 else 0)
    if model.engine == "deepspeed":
        return _deepspeed_gradients(model, trained)
    if model.split == "whole":
        return cast * trained.largest
    return max(cast * trained.head, item * trained.head + UNREDUCED_BYTES * trained.layer)


def _deepspeed_gradients(model: PlacedModel, trained: Units) -> int:
    settings, item = model.settings, item_bytes(model)
    bucket = deepspeed_elements(settings, "reduce_bucket_size")
    # a tensor larger than the bucket goes by itself
    filled = min(trained.total, max(bucket, trained.largest))
    single = (4 + (item if item < 4 else 0)) * trained.largest
    if settings.zero == 0:
        return single
    if is_bf16_optimizer(settings):
        return item * trained.total + 4 * trained.largest
    if settings.zero == 1:
        return 4 * bucket + single
    if settings.zero == 2:
        # in float32 a second copy of the partition joins the first one; in 16 bits the bucket is cast to be summed
        partition = 4 * -(-trained.total // model.layout.dp)
        return item * bucket + (4 * filled + partition if item == 4 else 6 * filled)
    # the bucket itself is kept (State.buffers): its gradients in the order of the ranks, and the sums
    return 8 * filled + single


def update_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the bytes at the end of a mini-batch: gradients are reduced over the replicas, then the optimizer steps.

    On CUDA torch updates all tensors at once, with a float32 number more for each; DTensors one after the other.
    """
    trained = trained_units(model, shape, rank)
    if model.engine == "deepspeed":
        return _deepspeed_update(model, trained)
    if model.engine == "megatron":
        # buffers are reduced where they are; the norm of all gradients takes a number of each tensor
        part = -(-trained.total // model.layout.dp) if model.settings.zero else trained.total
        return 4 * max(part, trained.largest)
    if model.split != "whole":
        scattered, stepped = UNREDUCED_BYTES * trained.root, 8 * trained.largest // model.num_shards
        return max(scattered, stepped, _summed_shards(model, trained))
    summed = 4 * trained.largest if model.layout.dp > 1 else 0
    return max(summed, 8 * trained.largest if model.layout.tp > 1 else 4 * trained.total)


def _summed_shards(model: PlacedModel, trained: Units) -> int:
    """Return the bytes of the largest bucket of gradients that is summed over nodes."""
    if model.num_shards == model.layout.dp:
        return 0
    most, largest = (-(-4 * elements // model.num_shards) for elements in (trained.total, trained.largest))
    return max(min(GRADIENT_BUCKET_BYTES, most), largest)


def _deepspeed_update(model: PlacedModel, trained: Units) -> int:
    settings = model.settings
    part = -(-trained.total // model.layout.dp) if settings.zero else trained.total
    if settings.offload_optimizer and settings.zero:
        return 0
    if settings.zero == 3:
        # the gradients of one group of parameters as a vector, and the optimizer's numbers for it
        return 8 * min(part, deepspeed_elements(settings, "sub_group_size"))
    return 4 * part
