"""Bytes of a placed model's state, passes and updates on DeepSpeed.

ZeRO-3 gathers tensor by tensor, ahead of their use. DeepSpeed differs from the ZeRO paper: from stage 1 on it keeps
float32 master weights even of a float32 model, and at stage 3 it keeps its gradients between steps. Counted on the live
tensors of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flexrlhf.api import EngineBytes, ModelShape, ModelSpec, Parameters, PlacedModel, State, Units, count_elements
from flexrlhf.engines.deepspeed.config import ELEMENTS


class DeepSpeedBytes(EngineBytes):
    """Bytes of a placed model on DeepSpeed, by ZeRO stage."""

    def has_masters(self, model: PlacedModel) -> bool:
        return super().has_masters(model) or model.settings.zero >= 1

    def frozen_weights(self, model: PlacedModel, shape: ModelShape, rank: int) -> int:
        if model.settings.zero == 3:
            return model.item_bytes * _zero3_elements(
                _slices(model, shape, rank).parameters, model.layout.of_weights.dp
            )
        return super().frozen_weights(model, shape, rank)

    def trained_state(self, model: PlacedModel, shape: ModelShape, rank: int) -> State:
        settings, stage = model.settings, model.settings.zero
        per, shape = self.per_parameter(model), _slices(model, shape, rank)
        weights, gradients, optimizer = per.zero_split(stage, model.layout.of_weights.dp)
        state = State(
            weights=per.weights * _elements(shape.parameters, stage, weights),
            gradients=per.gradients * _elements(shape.with_gradients, stage, gradients),
            optimizer=per.optimizer * _elements(shape.with_gradients, stage, optimizer),
            # its reduce bucket is made once at stage 3, and for every backward pass at stages 1 and 2
            buffers=4 * _setting(settings, "reduce_bucket_size") if stage == 3 else 0,
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
        stage, item = model.settings.zero, model.item_bytes
        partition = _elements(shape.with_gradients, stage, model.layout.of_weights.dp)
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
        ahead = min(units.total, _setting(model.settings, "stage3_prefetch_bucket_size"))
        reused = _setting(model.settings, "stage3_max_reuse_distance") // 2 if model.trained else 0
        # an MLP in tiles is gathered whole
        largest = max(units.largest, units.mlp) if model.settings.tiled_mlp else units.largest
        # prefetched tensors arrive in one buffer and are copied from there
        return model.item_bytes * (min(units.total, reused + ahead + 2 * largest) + ahead)

    def new_gradients(self, model: PlacedModel, trained: Units) -> int:
        settings, item = model.settings, model.item_bytes
        bucket = _setting(settings, "reduce_bucket_size")
        # a tensor larger than the bucket goes by itself
        filled = min(trained.total, max(bucket, trained.largest))
        tiled = self.tiled_gradients(model, trained)
        single = max(self.cast_bytes(model) * trained.largest, tiled)
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
            return 8 * min(part, _setting(settings, "sub_group_size"))
        return 4 * part


def _slices(model: PlacedModel, shape: ModelShape, rank: int) -> ModelShape:
    """Return ``shape`` with the sizes of tensor-parallel parts, before DeepSpeed shards them."""
    if model.layout.dims.tp == 1:
        return shape
    parts = shape.parts_on(model, rank)
    sizes = ((name, tuple(map(len, parts[name].box))) for name, _ in shape.parameters)
    return replace(shape, parameters=tuple(sizes))


def _is_bf16_optimizer(settings: ModelSpec) -> bool:
    """Whether DeepSpeed uses its BF16_Optimizer, which keeps float32 gradients of the whole model."""
    return settings.zero == 1 and settings.dtype == "bfloat16" and not settings.offload_optimizer


def _elements(parameters: Parameters, stage: int, num_ranks: int) -> int:
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


def _setting(settings: ModelSpec, name: str) -> int:
    """Return one of DeepSpeed's buffer sizes, in elements: the user's setting, else our default."""
    return int(settings.config.get("zero_optimization", {}).get(name, ELEMENTS[name]))
