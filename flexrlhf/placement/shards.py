"""What a rank holds of a tensor: the slice of tensor parallelism, and of that the part that ZeRO leaves it.

Engines shard as their libraries do; this is the same on paper, so that bytes are known from the plan and weights can
travel between any two layouts: ``comm/weights.py`` gathers parts into tensors and cuts tensors into parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexrlhf.placement.placed import PlacedModel
from flexrlhf.placement.shapes import ModelShape

COLUMNWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")
"""Linear layers that tensor parallelism cuts along their outputs, and along their inputs (Shoeybi et al. 2019)."""


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


def parts_on(model: PlacedModel, shape: ModelShape, rank: int) -> dict[str, Part]:
    """Parameter name → what ``rank`` holds of it."""
    return {name: _part(model, name, size, rank) for name, size in shape.parameters}


def _part(model: PlacedModel, name: str, size: tuple[int, ...], rank: int) -> Part:
    layout = model.layout
    box = list(whole(size).box)
    dim = tensor_parallel_dim(name, size, layout.tp) if layout.tp > 1 else None
    if dim is not None:
        box[dim] = _share(size[dim], layout.tp, layout.tp_index(rank))
    match model.split:
        case "rows":
            inner = _share(len(box[0]), layout.dp, layout.replica(rank))
            box[0] = box[0][inner.start : inner.stop]
        case "flat":
            return Part(size, tuple(box), _share(math.prod(map(len, box)), layout.dp, layout.replica(rank)))
    return Part(size, tuple(box))


def _share(size: int, count: int, index: int) -> range:
    """``torch.chunk``'s rule, and DeepSpeed's: equal parts, rounded up; the last ones may be smaller or empty."""
    step = -(-size // count)
    return range(min(index * step, size), min((index + 1) * step, size))
