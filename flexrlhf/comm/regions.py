"""Regions of a tensor in the live tensor of the part that a rank stores."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from torch import Tensor

from flexrlhf.weights.boxes import Box
from flexrlhf.weights.shards import Part


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
