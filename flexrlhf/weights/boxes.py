"""Boxes: rectangular sets of a tensor's elements, of which every part that a rank stores is made.

What two ranks have in common of a tensor is a box again, whichever way each of them is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from flexrlhf.weights.shards import Part

Box = tuple[range, ...]
"""A range of indices for each dim of a tensor."""


def box_elements(box: Box) -> int:
    """Return the number of elements in ``box``."""
    return math.prod(map(len, box))


def intersection(first: Box, second: Box) -> Box | None:
    """Return the elements that two boxes of a tensor have in common; None where there are none."""
    common = tuple(
        range(max(one.start, other.start), min(one.stop, other.stop)) for one, other in zip(first, second, strict=True)
    )
    return common if all(common) else None


def num_rows(box: Box) -> int:
    """Return the number of indices of the first dim along which ``box`` can be cut; 1 where it is one element."""
    return next((len(side) for side in box if len(side) > 1), 1)


def cut_rows(box: Box, rows: range) -> Box:
    """Return the part of ``box`` with ``rows``, a range within ``num_rows``."""
    dim = next((dim for dim, side in enumerate(box) if len(side) > 1), None)
    return box if dim is None else (*box[:dim], box[dim][rows.start : rows.stop], *box[dim + 1 :])


@lru_cache(maxsize=65536)
def boxes_of(part: Part) -> tuple[Box, ...]:
    """Return the disjoint boxes that make up ``part``, in row-major order; few of them: at most 2 ndim - 1."""
    flat = range(box_elements(part.box)) if part.flat is None else part.flat
    return tuple(_boxes_in(part.box, flat)) if flat else ()


def _boxes_in(box: Box, flat: range) -> Iterator[Box]:
    """Yield the boxes whose elements are the row-major range ``flat``, not empty, of the elements of ``box``."""
    if len(flat) == box_elements(box):
        yield box
        return
    rows, inner = box[0], box[1:]
    size = box_elements(inner)
    first, last = flat.start // size, (flat.stop - 1) // size
    begin, end = flat.start - first * size, flat.stop - last * size
    if first == last:
        yield from (((rows[first : first + 1]), *rest) for rest in _boxes_in(inner, range(begin, end)))
        return
    if begin:
        yield from (((rows[first : first + 1]), *rest) for rest in _boxes_in(inner, range(begin, size)))
        first += 1
    whole = rows[first : last + 1] if end == size else rows[first:last]
    if whole:
        yield (whole, *inner)
    if end < size:
        yield from (((rows[last : last + 1]), *rest) for rest in _boxes_in(inner, range(end)))


def slabs(box: Box, most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` elements that cover ``box``, cut along its first dims."""
    if box_elements(box) <= max(1, most):
        yield box
        return
    rows, inner = box[0], box[1:]
    size = box_elements(inner)
    if size > most:
        yield from ((rows[row : row + 1], *rest) for row in range(len(rows)) for rest in slabs(inner, most))
        return
    step = most // size
    yield from ((rows[start : start + step], *inner) for start in range(0, len(rows), step))
