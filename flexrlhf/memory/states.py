"""Bytes of weights, gradients and optimizer state of a placed model on a rank, by engine and ZeRO stage.

DeepSpeed 0.19.8 was counted on its live tensors. It differs from the ZeRO paper: from stage 1 on it keeps
float32 master weights even of a float32 model, and at stage 3 it keeps its gradients between steps.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from flexrlhf.config.spec import ModelSpec, OptimizerSpec
from flexrlhf.memory.activations import Blocks
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.lora import as_vllm_allocates
from flexrlhf.weights.shapes import DTYPE_BYTES, ModelShape, Parameters, count_elements
from flexrlhf.weights.shards import last_words, parts_of, shape_on

DEEPSPEED_ELEMENTS = {
    "reduce_bucket_size": 50_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "sub_group_size": 1_000_000_000,
}
"""Settings under ``zero_optimization`` that cost memory, in elements: as our configuration leaves them."""
MEGATRON_ALIGNMENT, MEGATRON_BUFFER_MULTIPLE = 64, 128
"""Elements at whose multiples Megatron-Core 0.16.1 lets a parameter and a buffer of its distributed optimizer begin."""


@dataclass(frozen=True)
class ZeroSplit:
    """Number of ranks over which each part of a model's state is split."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def zero_split(stage: int, num_ranks: int) -> ZeroSplit:
    """Return the split of a ZeRO stage (Rajbhandari et al. 2020, sec. 5): 1 optimizer, 2 gradients too, 3 weights
    too.
    """
    weights, gradients, optimizer = (num_ranks if stage >= first else 1 for first in (3, 2, 1))
    return ZeroSplit(weights, gradients, optimizer)


@dataclass(frozen=True)
class PerParameter:
    """Bytes per parameter before any split. ``optimizer``: state and float32 master weights (K of the ZeRO paper)."""

    weights: int
    gradients: int
    optimizer: int

    def on_rank(self, num_parameters: float, split: ZeroSplit) -> float:
        """Return the bytes on each rank (figure 1 and table 1 of the ZeRO paper)."""
        parts = (self.weights / split.weights, self.gradients / split.gradients, self.optimizer / split.optimizer)
        return num_parameters * sum(parts)


@dataclass(frozen=True)
class State:
    """Bytes of one placed model on one rank.

    weights:          as the passes read them.
    gradients:        while it trains, and always where ``keeps_gradients``.
    optimizer:        moments and master weights.
    moments:          part of it that the first update allocates.
    buffers:          allocated by its library in addition.
    host:             in host memory, by the settings that offload.
    cache:            keys and values of a rollout engine, lost when it is offloaded.
    keeps_gradients:  whether gradients stay allocated between instructions.
    stays:            nothing of it can be offloaded.
    transient:        it is released instead of offloaded, and nothing of it is copied to host memory.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    moments: int = 0
    buffers: int = 0
    host: int = 0
    cache: int = 0
    keeps_gradients: bool = False
    stays: bool = False
    transient: bool = False

    @property
    def resting(self) -> int:
        """Bytes on the device between instructions."""
        kept = self.gradients * self.keeps_gradients
        return self.weights + self.optimizer + self.buffers + self.cache + kept

    @property
    def loaded(self) -> int:
        """Bytes of ``resting`` once it is loaded."""
        return self.resting - self.moments

    @property
    def freed(self) -> int:
        """Bytes of ``resting`` that offloading or releasing frees; buffers of a library stay."""
        return 0 if self.stays else self.resting - self.buffers

    @property
    def offloaded(self) -> int:
        """Bytes of ``freed`` that offloading copies to host memory."""
        return 0 if self.stays or self.transient else self.freed - self.cache

    @property
    def training(self) -> int:
        """Bytes on the device while the model trains."""
        return self.weights + self.optimizer + self.buffers + self.gradients


def model_state(model: PlacedModel, shape: ModelShape, rank: int) -> State:
    """Return the state of ``model`` on ``rank``, one of its ranks."""
    shape = shape_on(model, shape, rank)
    if model.rollout is not None:
        # a child process goes on decoding while other models compute
        stays, cache = model.rollout.process == "child", kv_cache_bytes(model, shape) if model.has_cache else 0
        lora = model.settings.lora
        state = _frozen_state(model, shape if lora is None else as_vllm_allocates(model.role, shape, lora), rank)
        return replace(state, cache=cache, stays=stays, transient=model.is_transient)
    if not model.trained:
        return replace(_frozen_state(model, shape, rank), transient=model.is_transient)
    if model.engine == "deepspeed":
        return _deepspeed_state(model, shape)
    return (_megatron_state if model.engine == "megatron" else _torch_state)(model, shape, rank)


def bytes_per_parameter(model: PlacedModel) -> PerParameter:
    """Return the bytes per trained parameter: weights, float32 gradients, moments and master weights."""
    item, moments = item_bytes(model), 4 * num_moments(model.settings.optimizer)
    if model.split == "rows":
        return PerParameter(4, 4, moments)  # the float32 shards of FSDP2 are their own master weights
    has_master = item < 4 or (model.engine == "deepspeed" and model.settings.zero >= 1)
    return PerParameter(item, 4, moments + 4 * has_master)


def num_moments(optimizer: OptimizerSpec) -> int:
    """Return the float32 moments of each parameter: two of AdamW, a momentum of SGD, or none."""
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 2


def _frozen_state(model: PlacedModel, shape: ModelShape, rank: int) -> State:
    if model.engine == "deepspeed" and model.settings.zero == 3:
        weights = item_bytes(model) * _zero3_elements(shape.parameters, model.layout.dp)
    else:
        weights = item_bytes(model) * elements_on_rank(model, shape.parameters, rank)
    return State(0, host=weights) if model.settings.offload_parameters else State(weights)


def _torch_state(model: PlacedModel, shape: ModelShape, rank: int) -> State:
    """Return the state under FSDP2 and tensor parallelism, whose parts are all that is split."""
    per = bytes_per_parameter(model)
    trained = elements_on_rank(model, shape.trained, rank)
    frozen = elements_on_rank(model, shape.parameters, rank) - trained
    return State(
        weights=per.weights * trained + item_bytes(model) * frozen,
        gradients=per.gradients * trained,
        optimizer=per.optimizer * trained,
        moments=4 * num_moments(model.settings.optimizer) * trained,
    )


def _deepspeed_state(model: PlacedModel, shape: ModelShape) -> State:
    settings, stage = model.settings, model.settings.zero
    per, split = bytes_per_parameter(model), zero_split(stage, model.layout.dp)
    state = State(
        weights=per.weights * _deepspeed_elements(shape.parameters, stage, split.weights),
        gradients=per.gradients * _deepspeed_elements(shape.trained, stage, split.gradients),
        optimizer=per.optimizer * _deepspeed_elements(shape.trained, stage, split.optimizer),
        # its reduce bucket is made once at stage 3, and for every backward pass at stages 1 and 2
        buffers=4 * deepspeed_elements(settings, "reduce_bucket_size") if stage == 3 else 0,
        keeps_gradients=stage == 3 or is_bf16_optimizer(settings),
    )
    if settings.offload_optimizer and stage >= 1:
        state = _optimizer_on_host(state, model, shape)
    if settings.offload_parameters and stage == 3:
        state = replace(state, weights=0, host=state.host + state.weights)
    return state


def _megatron_state(model: PlacedModel, shape: ModelShape, rank: int) -> State:
    """Return the state on a rank of Megatron: gradients are summed in one float32 buffer, which stays allocated.

    Its distributed optimizer (zero 1) lays parameters out in buffers with gaps, of which each replica updates a part.
    """
    per, is_split = bytes_per_parameter(model), model.settings.zero == 1
    elements = elements_on_rank(model, shape.parameters, rank)
    buffer = megatron_buffer(model, shape, rank) if is_split else elements
    updated = buffer // model.layout.dp if is_split else elements
    return State(
        weights=per.weights * buffer,
        gradients=per.gradients * buffer,
        optimizer=per.optimizer * updated,
        moments=4 * num_moments(model.settings.optimizer) * updated,
        keeps_gradients=True,
    )


def megatron_buffer(model: PlacedModel, shape: ModelShape, rank: int) -> int:
    """Return the elements of a buffer of Megatron's distributed optimizer, which replicas share equally."""
    starts = sum(
        count * -(-elements_on_rank(model, (kind,), rank) // MEGATRON_ALIGNMENT) * MEGATRON_ALIGNMENT
        for kind, count in _kinds(shape.parameters).items()
    )
    multiple = math.lcm(model.layout.dp, MEGATRON_BUFFER_MULTIPLE)
    return -(-starts // multiple) * multiple


def is_bf16_optimizer(settings: ModelSpec) -> bool:
    """Whether DeepSpeed uses its BF16_Optimizer, which keeps float32 gradients of the whole model."""
    return settings.zero == 1 and settings.dtype == "bfloat16" and not settings.offload_optimizer


def _optimizer_on_host(state: State, model: PlacedModel, shape: ModelShape) -> State:
    """Return ``state`` with moments and master weights in host memory, and the copies that transfers need.

    Stage 1 keeps whole gradients on the device; stage 2 in 16 bits keeps its partition there.
    """
    stage, item = model.settings.zero, item_bytes(model)
    partition = _deepspeed_elements(shape.trained, stage, model.layout.dp)
    if stage == 3:
        return replace(state, gradients=0, optimizer=0, host=state.optimizer + 2 * 4 * partition)
    largest = item * max((math.prod(size) for _, size in shape.trained), default=0)
    host = state.optimizer + (4 + item) * partition + largest
    if stage == 2 and item == 4:
        return replace(state, gradients=0, optimizer=0, buffers=largest, host=host + 4 * partition)
    return replace(state, optimizer=0, buffers=largest, host=host)


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


def deepspeed_elements(settings: ModelSpec, name: str) -> int:
    """Return one of DeepSpeed's buffer sizes, in elements: the user's setting, else our default."""
    return int(settings.config.get("zero_optimization", {}).get(name, DEEPSPEED_ELEMENTS[name]))


def item_bytes(model: PlacedModel) -> int:
    """Return the bytes of one number of the model's dtype."""
    return DTYPE_BYTES[model.settings.dtype]


def elements_on_rank(model: PlacedModel, parameters: Parameters, rank: int) -> int:
    """Return the elements of ``parameters``, of the stage of ``rank``, on it: its shards of its tensor-parallel
    slices.
    """
    return sum(
        count * parts_of(model, (kind,), rank)[kind[0]].num_elements for kind, count in _kinds(parameters).items()
    )


def sliced_elements(model: PlacedModel, parameters: Parameters, rank: int) -> int:
    """Return the elements of ``parameters`` that ``rank`` computes with once shards are gathered."""
    gathered = replace(model, settings=model.settings.model_copy(update={"zero": 0}))
    return elements_on_rank(gathered, parameters, rank)


@lru_cache(maxsize=256)
def _kinds(parameters: Parameters) -> Counter[tuple[str, tuple[int, ...]]]:
    """Count parameters that are split alike: layers repeat, and a split depends on shape and the end of a name."""
    return Counter((last_words(name), size) for name, size in parameters)


def kv_cache_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the bytes of keys and values of ``generate_tokens`` tokens on each rank of ``model``.

    One block more is counted: vLLM never allocates its first one.
    """
    assert shape.sizes is not None, "planning refuses a rollout engine for families without known sizes"
    settings, block = model.settings, model.facts.cache_block
    blocks_of_stage = Blocks(shape.sizes, DTYPE_BYTES[settings.dtype], settings.tp, False, pp=settings.pp)
    per_token = blocks_of_stage.kv_bytes_per_token()
    return (-(-settings.generate_tokens // block) + 1) * block * per_token
