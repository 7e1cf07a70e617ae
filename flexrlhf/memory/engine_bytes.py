"""Bytes of a placed model's state, passes and updates on a rank, by engine.

FSDP2 gathers the embeddings and the head as one unit and each layer as another. States and transients were counted on
the live tensors of torch 2.13; transients are upper bounds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from flexrlhf.config.engines import EngineFacts
from flexrlhf.memory.states import (
    PerParameter,
    State,
    Units,
    all_units,
    kv_cache_bytes,
    trained_units,
)
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.shards import GRADIENT_BUCKET_BYTES, elements_on_rank

UNREDUCED_BYTES = 12
"""Per element of a unit while its gradients are scattered: as computed, as summands in float32, and the sums."""


def model_state(model: PlacedModel, shape: ModelShape, rank: int) -> State:
    """Return the state of ``model`` on ``rank``, one of its ranks."""
    shape = shape.on_rank(model, rank)
    if model.rollout is None and model.trained:
        return _of_engine(model.engine).trained_state(model, shape, rank)
    if model.rollout is not None and model.settings.lora is not None:
        allocated = shape.as_vllm_allocates(model.role, model.settings.lora)
    else:
        allocated = shape
    weights = _of_engine(model.engine).frozen_weights(model, allocated, rank)
    state = State(0, host=weights) if model.settings.offload_parameters else State(weights)
    if model.rollout is None:
        return replace(state, transient=model.is_transient)
    # a child process goes on decoding while other models compute
    stays, cache = model.rollout.process == "child", kv_cache_bytes(model, shape) if model.has_cache else 0
    for_restart = weights if stays and model.rollout.max_restarts else 0
    return replace(state, for_restart=for_restart, cache=cache, stays=stays, transient=model.is_transient)


def bytes_per_parameter(model: PlacedModel) -> PerParameter:
    """Return the bytes per trained parameter: weights, float32 gradients, moments and master weights."""
    return _of_engine(model.engine).per_parameter(model)


def gathered_bytes(model: PlacedModel, shape: ModelShape, rank: int, activations: int = 0) -> int:
    """Return the peak bytes of gathered weights of other ranks during a pass; 0 where every rank stores all.

    ``activations``: bytes that do not exist yet while the first unit arrives.
    """
    if model.split == "whole":
        return 0
    return _of_engine(model.engine).gathered(model, all_units(model, shape, rank), activations)


def new_gradient_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the bytes of a micro-batch's gradients before they are added to the mini-batch's."""
    return _of_engine(model.engine).new_gradients(model, trained_units(model, shape, rank))


def update_bytes(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the bytes at the end of a mini-batch: replicas reduce gradients, then the optimizer steps."""
    return _of_engine(model.engine).update(model, trained_units(model, shape, rank))


class EngineBytes:
    """Bytes of a placed model on the torch engine: FSDP2 and tensor parallelism, whose parts are all that is split.

    The functions above pass on whatever all engines count in the same way; other engines override the methods.
    """

    def per_parameter(self, model: PlacedModel) -> PerParameter:
        item, moments = model.item_bytes, 4 * model.settings.optimizer.num_moments
        if model.split == "rows":
            return PerParameter(4, 4, moments)  # the float32 shards of FSDP2 are their own master weights
        return PerParameter(item, 4, moments + 4 * self.has_masters(model))

    def has_masters(self, model: PlacedModel) -> bool:
        """Whether float32 master weights are stored next to the weights of a trained model."""
        return model.item_bytes < 4

    def frozen_weights(self, model: PlacedModel, shape: ModelShape, rank: int) -> int:
        return model.item_bytes * elements_on_rank(model, shape.parameters, rank, shape.sizes)

    def trained_state(self, model: PlacedModel, shape: ModelShape, rank: int) -> State:
        per = self.per_parameter(model)
        trained = elements_on_rank(model, shape.with_gradients, rank)
        frozen = elements_on_rank(model, shape.parameters, rank) - trained
        return State(
            weights=per.weights * trained + model.item_bytes * frozen,
            gradients=per.gradients * trained,
            optimizer=per.optimizer * trained,
            moments=4 * model.settings.optimizer.num_moments * trained,
        )

    def gathered(self, model: PlacedModel, units: Units, activations: int) -> int:
        item = model.item_bytes
        # a unit arrives in one buffer and is copied from there; float32 shards are sent as a 16-bit copy
        cast = model.num_shards if model.trained and item < 4 else 0
        at_first = 2 * units.root + 2 * units.layer + (units.root // cast if cast else 0)
        later = units.root + 3 * units.layer if model.settings.zero == 3 else units.total + 2 * units.layer
        later += units.turned + (units.layer // cast if cast else 0)
        return max(item * later, item * (at_first + units.turned) - activations)

    def new_gradients(self, model: PlacedModel, trained: Units) -> int:
        # the head sums its gradient in float32 and casts it; other tensors' are computed in their type, and then cast
        tiled = self.tiled_gradients(model, trained)
        if model.split == "whole":
            return max(self.cast_bytes(model) * trained.largest, tiled)
        sharded = model.item_bytes * trained.head + UNREDUCED_BYTES * trained.layer
        return max(self.cast_bytes(model) * trained.head, sharded, tiled)

    @staticmethod
    def tiled_gradients(model: PlacedModel, trained: Units) -> int:
        """Return the bytes of the gradients of an MLP in tiles, which sums those of all of its tensors in float32."""
        return (4 + model.item_bytes) * trained.mlp if model.settings.tiled_mlp else 0

    @staticmethod
    def cast_bytes(model: PlacedModel) -> int:
        """Return the bytes of a gradient in float32 and, in 16 bits, in its own type."""
        item = model.item_bytes
        return 4 + (item if item < 4 else 0)

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


@cache
def _of_engine(engine: str) -> EngineBytes:
    facts = EngineFacts.of(engine)
    counted: EngineBytes = facts.part(facts.memory)() if facts.memory else EngineBytes()
    return counted
