"""Shards: the part of each tensor that a rank stores, by pipeline stage, by tensor parallelism and by ZeRO.

Engines shard as their libraries do; this module computes the same parts before a run, so that bytes can be planned and
weights moved between any two layouts (``weights/transfers.py``).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from flexrlhf.config.axes import ParallelDims
from flexrlhf.config.engines import Split
from flexrlhf.placement.placed import PlacedModel
from flexrlhf.weights.decoder_sizes import Sizes
from flexrlhf.weights.parameters import HashedParameters, ParameterName, Parameters

OF_HEADS = ("q_b_proj", "kv_b_proj")
"""Linear layers from the latents of latent attention to its heads, which are split along their outputs, too."""
VOCABULARY = (ParameterName.EMBEDDING, ".lm_head.weight")
"""Tensors that some engines split along the vocabulary."""
GRADIENT_BUCKET_BYTES = 512_000_000
"""Bytes of gradients in one collective between GPUs: as many as weights in one of a sync."""


@dataclass(frozen=True)
class Part:
    """Part of a tensor of ``shape`` on one rank: the elements inside ``box``, of which ``flat`` is a row-major
    range.
    """

    shape: tuple[int, ...]
    box: tuple[range, ...]
    flat: range | None = None

    @cached_property
    def num_elements(self) -> int:
        return math.prod(len(side) for side in self.box) if self.flat is None else len(self.flat)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self == Part.whole(self.shape)

    @property
    def text(self) -> str:
        """The part as text, which ``load`` reads."""
        box = [[side.start, side.stop] for side in self.box]
        flat = None if self.flat is None else [self.flat.start, self.flat.stop]
        return json.dumps({"shape": self.shape, "box": box, "flat": flat})

    @classmethod
    def load(cls, text: str) -> Part:
        """Read the ``text`` of a part. Raises ValueError, KeyError or TypeError for any other text."""
        raw = json.loads(text)
        flat = None if raw["flat"] is None else range(*raw["flat"])
        return cls(tuple(raw["shape"]), tuple(range(*side) for side in raw["box"]), flat)

    def may_overlap(self, other: Part) -> bool:
        """Whether this and another part of a tensor may have elements in common; False is certain."""
        first, second = self._span, other._span
        return first.start < second.stop and second.start < first.stop

    @property
    def _span(self) -> range:
        """Least range of the flattened tensor that contains the part."""
        if self.num_elements == 0:
            return range(0)
        if self.flat is not None and self.box == Part.whole(self.shape).box:
            return self.flat
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(side.start * stride for side, stride in zip(self.box, strides, strict=True))
        last = sum((side.stop - 1) * stride for side, stride in zip(self.box, strides, strict=True))
        return range(first, last + 1)

    @staticmethod
    def cover(parts: Sequence[Part], shape: tuple[int, ...]) -> bool:
        """Whether pieces that a checkpoint has of a tensor are all of it, by their number of elements."""
        return sum(part.num_elements for part in dict.fromkeys(parts)) >= math.prod(shape)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        """Return the part that is all of a tensor of ``shape``."""
        return cls(shape, tuple(range(size) for size in shape))


Parts = Mapping[str, Part]
"""Part of each parameter on one rank, by name."""
PartKey = tuple[str, bool, tuple[int, ...]]


def tensor_parallel_dim(name: str, size: tuple[int, ...], tp: int) -> int | None:
    """Return the dim of parameter ``name`` that tensor parallelism splits; None where every rank stores all of it.

    The language head is split along the vocabulary where that divides; a tied one is the embedding and stays whole.
    Each rank has whole experts. Of an adapter only the matrix is split that has the outputs, or inputs, which are.
    """
    plain, matrix = ParameterName(name).without_adapter
    *_, module, kind = ("", *plain.split("."))
    if kind == "sinks" or ParameterName(name).is_of_experts:
        return 0
    if module in (*ParameterName.COLUMNWISE, *OF_HEADS) or (name == "lm_head.weight" and size[0] % tp == 0):
        return None if matrix == "lora_A" else 0
    return 1 if module in ParameterName.ROWWISE and kind == "weight" and matrix != "lora_B" else None


def fsdp_dim(name: str, size: tuple[int, ...], num_shards: int) -> int:
    """Return the dim of parameter ``name`` that FSDP2 splits: the first one, whose last shards may be empty.

    A shard that has one expert of a few may be a large part of the model: experts are split along the first dim, if
    any, that gives each rank equally much of it.
    """
    even = (dim for dim, length in enumerate(size) if length % num_shards == 0)
    return next(even, 0) if ParameterName(name).is_of_experts else 0


@dataclass(frozen=True)
class _Position:
    """Position of a rank in a pipeline stage: ``shard`` of ``num_shards`` replicas, and its ``place`` along the axes of
    ``dims`` that split tensors: tp, and ep, whose parts of the experts tp splits further.

    ``vocabulary_multiple``: embeddings are split along the vocabulary, padded to a multiple of so many rows; 0: whole.
    ``alike``: neighbours of ``tp`` with the same key-value head, where there are fewer heads than ranks.
    """

    split: Split
    num_shards: int
    shard: int
    dims: ParallelDims
    place: ParallelDims
    vocabulary_multiple: int
    alike: int = 1

    def part(self, name: str, size: tuple[int, ...]) -> Part:
        if ParameterName(name).is_router_bias:
            return Part.whole(size)
        tp, ep = self.dims.tp, self.dims.ep
        box = self._slice(name, size) if tp > 1 else list(Part.whole(size).box)
        shards, shard = self.num_shards, self.shard
        if ep > 1 and ParameterName(name).is_of_experts:
            box[0] = _share(size[0], ep * tp, self.place.ep * tp + self.place.tp)
            shards, shard = max(1, shards // ep), shard // ep
        match self.split:
            case "rows":
                dim = fsdp_dim(name, tuple(map(len, box)), shards)
                inner = _share(len(box[dim]), shards, shard)
                box[dim] = box[dim][inner.start : inner.stop]
            case "flat":
                return Part(size, tuple(box), _share(math.prod(map(len, box)), shards, shard))
        return Part(size, tuple(box))

    def _slice(self, name: str, size: tuple[int, ...]) -> list[range]:
        """Return the range of each dim that tensor parallelism assigns to the rank."""
        box, tp, index = list(Part.whole(size).box), self.dims.tp, self.place.tp
        dim = tensor_parallel_dim(name, size, tp)
        if self.vocabulary_multiple and f".{name}".endswith(VOCABULARY):
            padded = -(-size[0] // self.vocabulary_multiple) * self.vocabulary_multiple
            box[0] = _at(size[0], padded // tp, index)
        elif dim is not None:
            alike = self.alike if _is_of_keys(name) else 1
            box[dim] = _share(size[dim], tp // alike, index // alike)
        return box


@lru_cache(maxsize=256)
def named(parameters: Parameters, names: frozenset[str] | None) -> Parameters:
    """Return the ``parameters`` that are called ``names``; None: all."""
    return parameters if names is None else HashedParameters(each for each in parameters if each[0] in names)


def parts_of(model: PlacedModel, parameters: Parameters, rank: int, sizes: Sizes | None = None) -> Parts:
    """Return the part on ``rank`` of each of ``parameters``, which are in the pipeline stage of the rank, by name.

    ``sizes``: of a model that may have fewer key-value heads than tensor-parallel ranks.
    """
    return _parts(_position_on(model, rank, sizes), parameters)


def elements_on_rank(model: PlacedModel, parameters: Parameters, rank: int, sizes: Sizes | None = None) -> int:
    """Return the elements of ``parameters``, of the stage of ``rank``, on it: its shards of its tensor-parallel
    slices. ``sizes``: of a model that may have fewer key-value heads than tensor-parallel ranks.
    """
    return _elements(_position_on(model, rank, sizes), parameters)


def part_elements(parts: Parts, names: Sequence[str]) -> int:
    """Return the elements of the parts called ``names``."""
    return sum(parts[name].num_elements for name in names)


def _position_on(model: PlacedModel, rank: int, sizes: Sizes | None) -> _Position:
    layout, number = model.layout, model.num_shards
    alike = 1 if sizes is None else max(1, layout.dims.tp // sizes.kv_heads)
    dims = ParallelDims(tp=layout.dims.tp, ep=layout.dims.ep)
    place = ParallelDims(tp=layout.index("tp", rank), ep=layout.index("ep", rank))
    shard = layout.of_weights.replica(rank) % number
    return _Position(model.split, number, shard, dims, place, model.facts.vocabulary_multiple, alike)


@lru_cache(maxsize=1024)
def _parts(position: _Position, parameters: Parameters) -> Parts:
    # layers have the same parts, which are worth sharing: searches of large models make many of them
    keys, alike, _ = _part_keys(parameters)
    made = {key: position.part(*parameter) for key, parameter in alike.items()}
    return MappingProxyType({name: made[key] for name, key in keys.items()})


@lru_cache(maxsize=1024)
def _elements(position: _Position, parameters: Parameters) -> int:
    _, alike, counts = _part_keys(parameters)
    return sum(count * position.part(*alike[key]).num_elements for key, count in counts.items())


@lru_cache(maxsize=256)
def _part_keys(
    parameters: Parameters,
) -> tuple[dict[str, PartKey], dict[PartKey, tuple[str, tuple[int, ...]]], Counter[PartKey]]:
    """Return the key of the part of each parameter, a parameter with each key, and the number of them."""
    keys = {name: _part_key(name, size) for name, size in parameters}
    return keys, {keys[name]: (name, size) for name, size in parameters}, Counter(keys.values())


def _is_of_keys(name: str) -> bool:
    """Whether parameter ``name``, split along its outputs, is one of keys or values."""
    *_, module, _ = ("", *ParameterName(name).without_adapter[0].split("."))
    return module in ParameterName.OF_KEYS


def _part_key(name: str, size: tuple[int, ...]) -> PartKey:
    """Return all that a position's part depends on: the end of a name, and whether that is all of it."""
    end = ParameterName(name).last_words
    return end, end == name, size


def _share(size: int, count: int, index: int) -> range:
    """Return part ``index`` of ``count``, as torch.chunk and DeepSpeed split: parts rounded up, the last may be
    empty.
    """
    return _at(size, -(-size // count), index)


def _at(size: int, step: int, index: int) -> range:
    return range(min(index * step, size), min((index + 1) * step, size))


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
