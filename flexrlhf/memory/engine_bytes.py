"""Bytes of a placed model's state, passes and updates on a rank, by engine.

FSDP2 gathers the embeddings and the head as one unit and each layer as another; ZeRO-3 gathers tensor by tensor, ahead
of their use. States and transients were counted on the live tensors of torch 2.13 and DeepSpeed 0.19.8; transients are
upper bounds. DeepSpeed differs from the ZeRO paper: from stage 1 on it keeps float32 master weights even of a float32
model, and at stage 3 it keeps its gradients between steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from flexrlhf.config.engines import DEEPSPEED, MEGATRON
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.memory.states import (
    PerParameter,
    State,
    Units,
    all_units,
    count_kinds,
    item_bytes,
    kv_cache_bytes,
    num_moments,
    trained_units,
    with_fused_layers,
    zero_split,
)
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.lora import as_vllm_allocates
from flexrlhf.weights.shapes import HashedParameters, ModelShape, Parameters, count_elements
from flexrlhf.weights.shards import GRADIENT_BUCKET_BYTES, elements_on_rank, parts_of, shape_on

UNREDUCED_BYTES = 12
"""Per element of a unit while its gradients are scattered: as computed, as summands in float32, and the sums."""
DEEPSPEED_ELEMENTS = {
    "reduce_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""Settings under ``zero_optimization`` that cost memory, in elements: as our configuration leaves them."""
MEGATRON_ALIGNMENT, MEGATRON_BUFFER_MULTIPLE = 64, 128
"""Elements at whose multiples Megatron-Core 0.16.1 lets a parameter and a buffer of its distributed optimizer begin."""


def model_state(model: PlacedModel, shape: ModelShape, rank: int) -> State:
    """Return the state of ``model`` on ``rank``, one of its ranks."""
    shape = shape_on(model, shape, rank)
    if model.rollout is None and model.trained:
        return _of_engine(model).trained_state(model, shape, rank)
    if model.rollout is not None and model.settings.lora is not None:
        allocated = as_vllm_allocates(model.role, shape, model.settings.lora)
    else:
        allocated = shape
    weights = _of_engine(model).frozen_weights(model, allocated, rank)
    state = State(0, host=weights) if model.settings.offload_parameters else State(weights)
    if model.rollout is None:
        return replace(state, transient=model.is_transient)
    # a child process goes on decoding while other models compute
    stays, cache = model.rollout.process == "child", kv_cache_bytes(model, shape) if model.has_cache else 0
    for_restart = weights if stays and model.rollout.max_restarts else 0
    return replace(state, for_restart=for_restart, cache=cache, stays=stays, transient=model.is_transient)


def bytes_per_parameter(model: PlacedModel) -> PerParameter:
    """Return the bytes per trained parameter: weights, float32 gradients, moments and master weights."""
    return _of_engine(model).per_parameter(model)


def gathered_bytes(model: PlacedModel, shape: ModelShape, rank: int, activations: int = 0) -> int:
    """Return the peak bytes of gathered weights of other ranks during a pass; 0 where every rank stores all.

    ``activations``: bytes that do not exist yet while the first unit arrives.
    """
    if model.split == "whole":
        return 0
    return _of_engine(model).gathered(model, all_units(model, shape, rank), activations)


def new_gradient_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the bytes of a micro-batch's gradients before they are added to the mini-batch's."""
    return _of_engine(model).new_gradients(model, trained_units(model, shape, rank))


def update_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the bytes at the end of a mini-batch: replicas reduce gradients, then the optimizer steps."""
    return _of_engine(model).update(model, trained_units(model, shape, rank))


class EngineBytes:
    """Bytes of a placed model on the torch engine: FSDP2 and tensor parallelism, whose parts are all that is split.

    The functions above pass on whatever all engines count in the same way; other engines override the methods.
    """

    def per_parameter(self, model: PlacedModel) -> PerParameter:
        item, moments = item_bytes(model), 4 * num_moments(model.settings.optimizer)
        if model.split == "rows":
            return PerParameter(4, 4, moments)  # the float32 shards of FSDP2 are their own master weights
        return PerParameter(item, 4, moments + 4 * (item < 4))

    def frozen_weights(self, model: PlacedModel, shape: ModelShape, rank: int) -> int:
        return item_bytes(model) * elements_on_rank(model, shape.parameters, rank, shape.sizes)

    def trained_state(self, model: PlacedModel, shape: ModelShape, rank: int) -> State:
        per = self.per_parameter(model)
        trained = elements_on_rank(model, shape.with_gradients, rank)
        frozen = elements_on_rank(model, shape.parameters, rank) - trained
        return State(
            weights=per.weights * trained + item_bytes(model) * frozen,
            gradients=per.gradients * trained,
            optimizer=per.optimizer * trained,
            moments=4 * num_moments(model.settings.optimizer) * trained,
        )

    def gathered(self, model: PlacedModel, units: Units, activations: int) -> int:
        item = item_bytes(model)
        # a unit arrives in one buffer and is copied from there; float32 shards are sent as a 16-bit copy
        cast = model.num_shards if model.trained and item < 4 else 0
        at_first = 2 * units.root + 2 * units.layer + (units.root // cast if cast else 0)
        later = units.root + 3 * units.layer if model.settings.zero == 3 else units.total + 2 * units.layer
        later += units.turned + (units.layer // cast if cast else 0)
        return max(item * later, item * (at_first + units.turned) - activations)

    def new_gradients(self, model: PlacedModel, trained: Units) -> int:
        # the head sums its gradient in float32 and casts it; other tensors' are computed in their type, and then cast
        tiled = _tiled_gradients(model, trained)
        if model.split == "whole":
            return max(_cast_bytes(model) * trained.largest, tiled)
        sharded = item_bytes(model) * trained.head + UNREDUCED_BYTES * trained.layer
        return max(_cast_bytes(model) * trained.head, sharded, tiled)

    def update(self, model: PlacedModel, trained: Units) -> int:
        """Return the bytes of an update. On CUDA torch updates all tensors at once, with a float32 number more for
        each, as many as buckets of replicas' gradients have at most; FSDP2's shards one after the other.
        """
        if model.split != "whole":
            scattered, stepped = UNREDUCED_BYTES * trained.root, 8 * trained.largest // model.num_shards
            return max(scattered, stepped, self._summed_shards(model, trained))
        return 4 * trained.total

    @staticmethod
    def _summed_shards(model: PlacedModel, trained: Units) -> int:
        """Return the bytes of the largest bucket of gradients that is summed over nodes. CPUs have smaller ones."""
        if model.num_shards == model.layout.of_weights.dp:
            return 0
        most, largest = (-(-4 * elements // model.num_shards) for elements in (trained.total, trained.largest))
        return max(min(GRADIENT_BUCKET_BYTES, most), largest)


def _tiled_gradients(model: PlacedModel, trained: Units) -> int:
    """Return the bytes of the gradients of an MLP in tiles, which sums those of all of its tensors in float32."""
    return (4 + item_bytes(model)) * trained.mlp if model.settings.tiled_mlp else 0


def _cast_bytes(model: PlacedModel) -> int:
    """Return the bytes of a gradient in float32 and, in 16 bits, in its own type."""
    item = item_bytes(model)
    return 4 + (item if item < 4 else 0)


class DeepSpeedBytes(EngineBytes):
    """Bytes of a placed model on DeepSpeed, by ZeRO stage."""

    def per_parameter(self, model: PlacedModel) -> PerParameter:
        item, moments = item_bytes(model), 4 * num_moments(model.settings.optimizer)
        return PerParameter(item, 4, moments + 4 * (item < 4 or model.settings.zero >= 1))

    def frozen_weights(self, model: PlacedModel, shape: ModelShape, rank: int) -> int:
        if model.settings.zero == 3:
            return item_bytes(model) * _zero3_elements(
                _slices(model, shape, rank).parameters, model.layout.of_weights.dp
            )
        return super().frozen_weights(model, shape, rank)

    def trained_state(self, model: PlacedModel, shape: ModelShape, rank: int) -> State:
        settings, stage = model.settings, model.settings.zero
        per, shape = self.per_parameter(model), _slices(model, shape, rank)
        weights, gradients, optimizer = zero_split(stage, model.layout.of_weights.dp)
        state = State(
            weights=per.weights * _deepspeed_elements(shape.parameters, stage, weights),
            gradients=per.gradients * _deepspeed_elements(shape.with_gradients, stage, gradients),
            optimizer=per.optimizer * _deepspeed_elements(shape.with_gradients, stage, optimizer),
            # its reduce bucket is made once at stage 3, and for every backward pass at stages 1 and 2
            buffers=4 * _deepspeed_setting(settings, "reduce_bucket_size") if stage == 3 else 0,
            keeps_gradients=stage == 3 or _is_bf16_optimizer(settings),
        )
        if settings.offload_optimizer and stage >= 1:
            state = self._with_optimizer_on_host(state, model, shape)
        if settings.offload_parameters and stage == 3:
            state = replace(state, weights=0, host=state.host + state.weights)
        return state

    @staticmethod
    def _with_optimizer_on_host(state: State, model: PlacedModel, shape: ModelShape) -> State:
        """Return ``state`` with moments and master weights in host memory, and the copies that transfers need.

        Stage 1 keeps whole gradients on the device; stage 2 in 16 bits keeps its partition there.
        """
        stage, item = model.settings.zero, item_bytes(model)
        partition = _deepspeed_elements(shape.with_gradients, stage, model.layout.of_weights.dp)
        if stage == 3:
            return replace(state, gradients=0, optimizer=0, host=state.optimizer + 2 * 4 * partition)
        largest = item * max((math.prod(size) for _, size in shape.trained), default=0)
        host = state.optimizer + (4 + item) * partition + largest
        if stage == 2 and item == 4:
            return replace(state, gradients=0, optimizer=0, buffers=largest, host=host + 4 * partition)
        return replace(state, optimizer=0, buffers=largest, host=host)

    def gathered(self, model: PlacedModel, units: Units, activations: int) -> int:
        """Return the bytes of gathered tensors. One needed again within the reuse distance stays: half of that distance
        at the turn to backward.
        """
        ahead = min(units.total, _deepspeed_setting(model.settings, "stage3_prefetch_bucket_size"))
        reused = _deepspeed_setting(model.settings, "stage3_max_reuse_distance") // 2 if model.trained else 0
        # an MLP in tiles is gathered whole
        largest = max(units.largest, units.mlp) if model.settings.tiled_mlp else units.largest
        # prefetched tensors arrive in one buffer and are copied from there
        return item_bytes(model) * (min(units.total, reused + ahead + 2 * largest) + ahead)

    def new_gradients(self, model: PlacedModel, trained: Units) -> int:
        settings, item = model.settings, item_bytes(model)
        bucket = _deepspeed_setting(settings, "reduce_bucket_size")
        # a tensor larger than the bucket goes by itself
        filled = min(trained.total, max(bucket, trained.largest))
        tiled = _tiled_gradients(model, trained)
        single = max(_cast_bytes(model) * trained.largest, tiled)
        if settings.zero == 0:
            return single
        if _is_bf16_optimizer(settings):
            return item * trained.total + max(4 * trained.largest, tiled)
        if settings.zero == 1:
            return 4 * bucket + single
        if settings.zero == 2:
            # in float32 a second copy of the partition joins the first one; in 16 bits the bucket is cast to be summed
            partition = 4 * -(-trained.total // model.layout.of_weights.dp)
            return item * bucket + (4 * filled + partition if item == 4 else 6 * filled) + tiled
        # the bucket itself is kept (State.buffers): its gradients in the order of the ranks, and the sums
        return 8 * filled + single

    def update(self, model: PlacedModel, trained: Units) -> int:
        settings = model.settings
        part = -(-trained.total // model.layout.of_weights.dp) if settings.zero else trained.total
        if settings.offload_optimizer and settings.zero:
            return 0
        if settings.zero == 3:
            # the gradients of one group of parameters as a vector, and the optimizer's values for it
            return 8 * min(part, _deepspeed_setting(settings, "sub_group_size"))
        return 4 * part


def _slices(model: PlacedModel, shape: ModelShape, rank: int) -> ModelShape:
    """Return ``shape`` with the sizes of tensor-parallel parts, before DeepSpeed shards them."""
    if model.layout.tp == 1:
        return shape
    parts = parts_of(model, shape.parameters, rank)
    sizes = ((name, tuple(map(len, parts[name].box))) for name, _ in shape.parameters)
    return replace(shape, parameters=HashedParameters(sizes))


def _is_bf16_optimizer(settings: ModelSpec) -> bool:
    """Whether DeepSpeed uses its BF16_Optimizer, which keeps float32 gradients of the whole model."""
    return settings.zero == 1 and settings.dtype == "bfloat16" and not settings.offload_optimizer


def _deepspeed_elements(parameters: Parameters, stage: int, num_ranks: int) -> int:
    """Return a rank's elements: stage 3 splits every tensor, the others one flat vector, aligned to 2 elements a
    rank.
    """
    if num_ranks == 1:
        return count_elements(parameters)
    if stage == 3:
        return _zero3_elements(parameters, num_ranks)
    return 2 * -(-count_elements(parameters) // (2 * num_ranks))


def _zero3_elements(parameters: Parameters, num_ranks: int) -> int:
    """Return a rank's elements of stage 3: every rank stores as much of a tensor as any, the last one with padding."""
    return sum(-(-math.prod(size) // num_ranks) for _, size in parameters)


def _deepspeed_setting(settings: ModelSpec, name: str) -> int:
    """Return one of DeepSpeed's buffer sizes, in elements: the user's setting, else our default."""
    return int(settings.config.get("zero_optimization", {}).get(name, DEEPSPEED_ELEMENTS[name]))


class MegatronBytes(EngineBytes):
    """Bytes of a placed model on Megatron-Core: gradients are summed in one float32 buffer, which exists at loading and
    while it trains.
    """

    def trained_state(self, model: PlacedModel, shape: ModelShape, rank: int) -> State:
        """Return the state. The distributed optimizer (zero 1) lays parameters out in buffers with gaps, of which each
        replica updates a part.
        """
        per, is_split = self.per_parameter(model), model.settings.zero == 1
        elements = elements_on_rank(model, shape.with_gradients, rank)
        frozen = elements_on_rank(model, shape.parameters, rank) - elements
        buffer = megatron_buffer(model, shape.trained, rank) if is_split else elements
        updated = buffer // model.layout.of_weights.dp if is_split else elements
        return State(
            weights=per.weights * buffer + item_bytes(model) * frozen,
            gradients=per.gradients * buffer,
            optimizer=per.optimizer * updated,
            moments=4 * num_moments(model.settings.optimizer) * updated,
            at_load=per.gradients * buffer,
        )

    def update(self, model: PlacedModel, trained: Units) -> int:
        # buffers are reduced where they are; the norm of all gradients takes a number of each tensor
        part = -(-trained.total // model.layout.of_weights.dp) if model.settings.zero else trained.total
        return 4 * max(part, trained.largest)


def megatron_buffer(model: PlacedModel, trained: Parameters, rank: int) -> int:
    """Return the elements of a buffer of Megatron's distributed optimizer, which replicas share equally."""
    starts = sum(
        count * -(-elements_on_rank(model, (kind,), rank) // MEGATRON_ALIGNMENT) * MEGATRON_ALIGNMENT
        for kind, count in count_kinds(with_fused_layers(trained)).items()
    )
    multiple = math.lcm(model.layout.of_weights.dp, MEGATRON_BUFFER_MULTIPLE)
    return -(-starts // multiple) * multiple


_ENGINES: Mapping[str, EngineBytes] = {DEEPSPEED.name: DeepSpeedBytes(), MEGATRON.name: MegatronBytes()}
_TORCH = EngineBytes()


def _of_engine(model: PlacedModel) -> EngineBytes:
    return _ENGINES.get(model.engine, _TORCH)
