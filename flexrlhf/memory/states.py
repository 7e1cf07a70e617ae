"""State of a placed model on a rank, and the elements of its tensors there, counted in the same way for all engines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.memory.activations import Blocks
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.weights.model_shape import ModelShape
from flexrlhf.weights.parameters import HashedParameters, ParameterName, Parameters
from flexrlhf.weights.shards import elements_on_rank, fsdp_dim, parts_of


@dataclass(frozen=True)
class PerParameter:
    """Bytes per parameter before any split. ``optimizer``: state and float32 master weights (K of the ZeRO paper)."""

    weights: int
    gradients: int
    optimizer: int

    @staticmethod
    def zero_split(stage: int, num_ranks: int) -> tuple[int, int, int]:
        """Return the ranks over which a ZeRO stage splits weights (3), gradients (from 2 on) and optimizer (from 1).

        Rajbhandari et al. 2020, sec. 5.
        """
        return (num_ranks if stage == 3 else 1, num_ranks if stage >= 2 else 1, num_ranks if stage >= 1 else 1)

    def on_rank(self, num_parameters: float, stage: int = 0, num_ranks: int = 1) -> float:
        """Return the bytes on each rank of a ZeRO stage (figure 1 and table 1 of the ZeRO paper)."""
        weights, gradients, optimizer = self.zero_split(stage, num_ranks)
        return num_parameters * (self.weights / weights + self.gradients / gradients + self.optimizer / optimizer)


@dataclass(frozen=True)
class State:
    """Bytes of one placed model on one rank.

    weights:          as the passes read them.
    gradients:        while it trains, and always where ``keeps_gradients``.
    optimizer:        moments and master weights.
    moments:          part of it that the first update allocates.
    buffers:          allocated by its library in addition.
    host:             in host memory, by the settings that offload.
    for_restart:      copy of the weights in host memory, for a child process that is replaced.
    cache:            keys and values of a rollout engine, lost when it is offloaded.
    graphs:           CUDA graphs of a rollout engine, which go to host memory when it is offloaded.
    keeps_gradients:  whether gradients stay allocated between instructions.
    at_load:          in addition while it is loaded.
    stays:            nothing of it can be offloaded.
    transient:        it is released instead of offloaded, and nothing of it is copied to host memory.
    lent:             weights of its source that it stores for it, whose memory is freed while it exists.
    viewed:           weights of its source that it has views of, which stay on the device while it exists.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    moments: int = 0
    buffers: int = 0
    host: int = 0
    for_restart: int = 0
    cache: int = 0
    graphs: int = 0
    keeps_gradients: bool = False
    at_load: int = 0
    stays: bool = False
    transient: bool = False
    lent: int = 0
    viewed: int = 0

    @property
    def resting(self) -> int:
        """Bytes on the device between instructions."""
        kept = self.gradients * self.keeps_gradients
        return self.weights + self.optimizer + self.buffers + self.cache + self.graphs + kept

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


def reused_bytes(states: Mapping[ModelName, State | None], absent: Collection[str]) -> int:
    """Return the bytes that are on the device in addition to the ``resting`` ones of models there, and to the ones that
    are not ``freed`` of others: below 0, if copies store weights for their sources.

    absent:  models that are offloaded or released.
    """
    found = 0
    for name, state in states.items():
        if state is not None and name not in absent and (state.lent or state.viewed):
            found += state.viewed if name.role in absent else -state.lent
    return found


def as_gathered(model: PlacedModel) -> PlacedModel:
    """Return ``model`` as it is once shards are gathered."""
    return replace(model, settings=model.settings.model_copy(update={"zero": 0}))


def sliced_elements(model: PlacedModel, parameters: Parameters, rank: int) -> int:
    """Return the elements of ``parameters`` that ``rank`` computes with."""
    return elements_on_rank(as_gathered(model), parameters, rank)


def kv_cache_bytes(model: PlacedModel, shape: ModelShape) -> int:
    """Return the bytes of keys and values of ``generate_tokens`` tokens on each rank of ``model``.

    One block more is counted: vLLM never allocates its first one.
    """
    assert shape.sizes is not None, "planning refuses a rollout engine for families without known sizes"
    settings, block = model.settings, model.facts.cache_block
    per_token = Blocks(shape.sizes, settings.item_bytes, settings.dims).kv_bytes_per_token()
    return (-(-settings.generate_tokens // block) + 1) * block * per_token


@dataclass(frozen=True)
class Units:
    """Elements that a rank computes with.

    total:    of all weights.
    root:     outside layers.
    layer:    of the largest layer.
    largest:  of the largest tensor.
    head:     of the language head.
    mlp:      of the MLP of that layer.
    turned:   of that layer's experts, if FSDP2 splits them along another dim than the first: it puts their shards in
              order once more.
    """

    total: int
    root: int
    layer: int
    largest: int
    head: int
    mlp: int
    turned: int = 0


def all_units(model: PlacedModel, shape: ModelShape, rank: int) -> Units:
    """Return the units of all parameters of the stage on ``rank``."""
    parameters = _stage(model, shape, rank).parameters
    units, turned = _units(model, parameters, rank), _turned(model, parameters, rank)
    return replace(units, turned=turned) if turned else units


def trained_units(model: PlacedModel, shape: ModelShape, rank: int) -> Units:
    """Return the units of the trained parameters of the stage on ``rank``."""
    return _units(model, _stage(model, shape, rank).with_gradients, rank)


def _stage(model: PlacedModel, shape: ModelShape, rank: int) -> ModelShape:
    return shape.of_stage(model.layout.index("pp", rank), model.layout.dims.pp)


def _units(model: PlacedModel, parameters: Parameters, rank: int) -> Units:
    """Return units from a cache: they depend on few settings, and plans need them for many models that share these."""
    layout, is_scalar = model.layout, model.head == "scalar"
    if model.facts.fused_layers:
        parameters = with_fused_layers(parameters)
    return _units_of(model.engine, _of_tensors(layout.dims), is_scalar, parameters, layout.index("tp", rank))


def _turned(model: PlacedModel, parameters: Parameters, rank: int) -> int:
    """Return the elements of ``Units.turned``."""
    layout, shards = model.layout, model.num_shards // model.layout.dims.expert_parts
    experts = () if model.split != "rows" or shards == 1 else _experts(parameters)
    if not experts:
        return 0
    place = layout.index("tp", rank) + layout.dims.tp * layout.index("ep", rank)
    return _turned_of(model.engine, _of_tensors(layout.dims), experts, place, shards)


@lru_cache(maxsize=1024)
def _turned_of(engine: str, dims: ParallelDims, experts: Parameters, rank: int, shards: int) -> int:
    gathered = parts_of(as_gathered(_plain(engine, dims)), experts, rank)
    sizes = {name: tuple(map(len, part.box)) for name, part in gathered.items()}
    return sum(math.prod(size) for name, size in sizes.items() if fsdp_dim(name, size, shards))


@lru_cache(maxsize=256)
def _experts(parameters: Parameters) -> Parameters:
    """Return the parameters of the experts of the largest layer."""
    return tuple(item for item in _root_and_layer(parameters)[1] if ParameterName(item[0]).is_of_experts)


@cache
def _plain_settings(engine: str) -> ModelSpec:
    return ModelSpec(engine=engine)


@lru_cache(maxsize=256)
def with_fused_layers(parameters: Parameters) -> Parameters:
    """Return ``parameters`` as Megatron-Core stores them: fused ones are one, called by the first of them."""
    fused: dict[str, tuple[int, ...]] = {}
    for name, size in parameters:
        first = ParameterName(name).fused
        rows = fused[first][0] if first in fused else 0
        fused[first] = (rows + size[0], *size[1:])
    return HashedParameters(sorted(fused.items()))


@lru_cache(maxsize=1024)
def _units_of(engine: str, dims: ParallelDims, is_scalar: bool, parameters: Parameters, rank: int) -> Units:
    model = _plain(engine, dims)
    root, layer = _root_and_layer(parameters)
    head = () if is_scalar else _head(parameters)
    mlp = tuple(item for item in layer if ".mlp." in item[0])
    total, outside, largest_layer, head_elements, mlp_elements = (
        sliced_elements(model, part, rank) for part in (parameters, root, layer, head, mlp)
    )
    largest = max((sliced_elements(model, (item,), rank) for item in {*_largest(root), *_largest(layer)}), default=0)
    return Units(total, outside, largest_layer, largest, head_elements, mlp_elements)


def _of_tensors(dims: ParallelDims) -> ParallelDims:
    """Return the degrees of the axes that split tensors."""
    return ParallelDims(tp=dims.tp, ep=dims.ep)


def _plain(engine: str, dims: ParallelDims) -> PlacedModel:
    """Return one copy of a model, on each of its expert-parallel ranks, with the settings that an engine has."""
    layout = Layout(tuple(range(dims.parts * dims.expert_parts)), dims)
    return PlacedModel(ModelName(""), layout, trained=False, settings=_plain_settings(engine))


def _largest(parameters: Parameters) -> Parameters:
    return tuple(sorted(parameters, key=lambda item: math.prod(item[1]))[-1:])


def _head(parameters: Parameters) -> Parameters:
    """Return the language head; a tied one is the embedding."""
    found = dict(parameters)
    name = ParameterName.LANGUAGE_HEAD if ParameterName.LANGUAGE_HEAD in found else "model.embed_tokens.weight"
    return ((name, found[name]),) if name in found else ()


@lru_cache(maxsize=256)
def _root_and_layer(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return the parameters outside layers, and the largest layer's. A layer has a number in its name."""
    layers: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, size in parameters:
        words = name.split(".")
        number = next((index for index, word in enumerate(words) if word.isdigit()), None)
        layers["" if number is None else ".".join(words[: number + 1])].append((name, size))
    root = tuple(layers.pop("", ()))
    sizes = {name: sum(math.prod(size) for _, size in members) for name, members in layers.items()}
    return root, tuple(layers[max(sizes, key=lambda name: sizes[name])]) if sizes else ()
