"""Elements of a model's weights as a copy of it stores them, with adapters merged where it has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from torch import Tensor

from flexrlhf.comm.weights import Weights, merged
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.weights.boxes import Box
from flexrlhf.weights.lora import merged_from
from flexrlhf.weights.shards import Part, Parts
from flexrlhf.weights.transfer_plan import Region


@dataclass(frozen=True)
class TrainedValues:
    """Weights on one rank.

    weights:   live local parts.
    parts:     what they are, by the copy's names.
    lora:      adapters that the copy stores inside the weights that they change; None: none.
    adapters:  these, whole and in float32.
    """

    weights: Weights
    parts: Parts
    lora: LoraSpec | None = None
    adapters: Weights = field(default_factory=dict)

    def __getitem__(self, region: Region) -> Tensor:
        """Return the elements of ``region``; merged in float32, so that the sum is rounded once."""
        part = self.parts[region.name]
        if self.lora is None:
            return view_of(self.weights[region.name].detach(), part, region.box)
        base, a, b = merged_from(region.name)
        rows, columns = (slice(side.start, side.stop) for side in region.box)
        values = view_of(self.weights[base].detach(), part, region.box).float()
        return merged(self.lora, values, self.adapters[a][:, columns], self.adapters[b][rows])


def view_of(local: Tensor, part: Part, box: Box) -> Tensor:
    """Return the elements of ``box``, which are within ``part``, as a view of ``local``: the tensor of that part.

    ``local`` has as many elements as ``part``; where this is a flat range, they are contiguous.
    """
    offsets = [side.start - whole.start for side, whole in zip(box, part.box, strict=True)]
    sizes = [len(whole) for whole in part.box]
    if part.flat is None:
        shaped = local.view(sizes)
        return shaped[tuple(slice(at, at + len(side)) for at, side in zip(offsets, box, strict=True))]
    strides = _strides(sizes)
    first = sum(at * stride for at, stride in zip(offsets, strides, strict=True)) - part.flat.start
    return local.as_strided(tuple(map(len, box)), strides, local.storage_offset() + first)


def _strides(sizes: list[int]) -> tuple[int, ...]:
    """Return the row-major strides of a tensor of ``sizes``."""
    return tuple(accumulate(reversed(sizes[1:]), mul, initial=1))[::-1] if sizes else ()
