"""What a rank holds of a tensor: the slice of tensor parallelism, and of that the part that ZeRO leaves it.

Engines shard as their libraries do; this is the same on paper, so that bytes are known from the plan and weights can
travel between any two layouts: ``comm/weights.py`` gathers parts into tensors and cuts tensors into parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from flexrlhf.placement.placed import PlacedModel, Split
from flexrlhf.weights.lora import shape_of
from flexrlhf.weights.shapes import ModelShape, Parameters

COLUMNWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")
"""Linear layers that tensor parallelism cuts along their outputs, and along their inputs (Shoeybi et al. 2019)."""
VOCABULARY = (".embed_tokens.weight", ".lm_head.weight")
VOCABULARY_MULTIPLE = 64
"""vLLM cuts these along the vocabulary, which it first pads to a multiple of so many rows."""


@dataclass(frozen=True)
class Part:
    """Those numbers of a tensor of ``shape`` that one rank holds: a box, or of its row-major numbers ``flat``."""

    shape: tuple[int, ...]
    box: tuple[range, ...]
    flat: range | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(len(side) for side in self.box) if self.flat is None else len(self.flat)

    @property
    def is_whole(self) -> bool:
        return self.num_elements == math.prod(self.shape)


def whole(shape: tuple[int, ...]) -> Part:
    return Part(shape, tuple(range(size) for size in shape))


def tensor_parallel_dim(name: str, size: tuple[int, ...], tp: int) -> int | None:
    """The dim of parameter ``name`` that tensor parallelism cuts; None: every rank holds all of it.

    The language head is cut along the vocabulary where that divides; a tied one is the embedding and stays whole.
    """
    *_, module, kind = ("", *name.split("."))
    if module in COLUMNWISE or (name == "lm_head.weight" and size[0] % tp == 0):
        return 0
    return 1 if module in ROWWISE and kind == "weight" else None


@dataclass(frozen=True)
class _Place:
    """What decides which part of a tensor a rank holds: ``replica`` of ``dp``, ``tp_index`` of ``tp``.

    ``cuts_vocabulary``: as a rollout engine does.
    """

    split: Split
    dp: int
    tp: int
    replica: int
    tp_index: int
    cuts_vocabulary: bool

    def part(self, name: str, size: tuple[int, ...]) -> Part:
        box = self._slice(name, size) if self.tp > 1 else list(whole(size).box)
        match self.split:
            case "rows":
                inner = _share(len(box[0]), self.dp, self.replica)
                box[0] = box[0][inner.start : inner.stop]
            case "flat":
                return Part(size, tuple(box), _share(math.prod(map(len, box)), self.dp, self.replica))
        return Part(size, tuple(box))

    def _slice(self, name: str, size: tuple[int, ...]) -> list[range]:
        """What tensor parallelism leaves of each dim."""
        box = list(whole(size).box)
        dim = tensor_parallel_dim(name, size, self.tp)
        if self.cuts_vocabulary and f".{name}".endswith(VOCABULARY):
            padded = -(-size[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
            box[0] = _at(size[0], padded // self.tp, self.tp_index)
        elif dim is not None:
            box[dim] = _share(size[dim], self.tp, self.tp_index)
        return box


def parts_on(model: PlacedModel, shape: ModelShape, rank: int) -> Mapping[str, Part]:
    """Parameter name → what ``rank`` holds of it. Ranks in the same place share the answer."""
    layout, split = model.layout, model.split
    replica = 0 if split == "whole" else layout.replica(rank)
    shape = shape_of(model, shape)
    place = _Place(split, layout.dp, layout.tp, replica, layout.tp_index(rank), model.rollout is not None)
    return _parts(place, shape.parameters)


@lru_cache(maxsize=1024)
def _parts(place: _Place, parameters: Parameters) -> Mapping[str, Part]:
    return MappingProxyType({name: place.part(name, size) for name, size in parameters})


def _share(size: int, count: int, index: int) -> range:
    """``torch.chunk``'s rule, and DeepSpeed's: equal parts, rounded up; the last ones may be smaller or empty."""
    return _at(size, -(-size // count), index)


def _at(size: int, step: int, index: int) -> range:
    return range(min(index * step, size), min((index + 1) * step, size))
