"""Reading of parts of tensors from safetensors files: the bytes of a rank's part alone, a block at a time.

Files are read, not mapped: mapped pages would count as memory of the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from io import FileIO

import torch
from torch import Tensor

from flexrlhf.errors import UserError
from flexrlhf.weights.boxes import Box, boxes_of, intersection
from flexrlhf.weights.expert_files import FilePiece
from flexrlhf.weights.model_files import BLOCK_BYTES, StoredTensor
from flexrlhf.weights.shards import Part

StoredPieces = Sequence[tuple[FilePiece, StoredTensor]]
"""Stored tensors that a parameter consists of, and the part of it that each is."""

TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""Types of weights by their names in files."""


class PartReader:
    """Reader of parts of tensors; one buffer serves all of them, so that nothing but the parts stays allocated."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read_pieces(self, pieces: StoredPieces, part: Part, target: Tensor) -> None:
        """Read ``part`` of a parameter, which consists of ``pieces``, into ``target``, as ``read`` does."""
        if len(pieces) == 1:
            self.read(pieces[0][1], part, target)
            return
        start, vector = 0, target.view(-1)
        for box in boxes_of(part):
            shape = [len(side) for side in box]
            values = vector[start : start + math.prod(shape)].view(shape)
            start += values.numel()
            for piece, stored in pieces:
                common = intersection(box, piece.box)
                if common is not None:
                    inside = _within(common, piece.box)[-len(piece.shape) :]
                    places = tuple(slice(side.start, side.stop) for side in _within(common, box))
                    self.read(stored, Part(piece.shape, inside), values[places])

    @torch.no_grad()
    def read(self, stored: StoredTensor, part: Part, target: Tensor) -> int:
        """Read ``part`` of a stored tensor into ``target``, of as many elements and any type and device.

        Returns the bytes that were read: the part's, and whole rows if the part has some columns of them.
        """
        vector, inner = target.view(-1), part.box[1:]
        has_whole_rows = all(side == range(size) for side, size in zip(inner, part.shape[1:], strict=True))
        try:
            with stored.file.open("rb", buffering=0) as file:
                if has_whole_rows:
                    return self._read_range(file, stored, _elements(part), vector)
                if part.flat is None:
                    return self._read_columns(file, stored, part, vector)
                return self._read_range_of_columns(file, stored, part, part.flat, vector)
        except OSError as error:
            raise UserError(f"{stored.file}: cannot be read ({error.strerror or error})") from None

    def _read_range(self, file: FileIO, stored: StoredTensor, elements: range, target: Tensor) -> int:
        """Read a range of the flattened tensor into a vector."""
        item = TORCH_TYPES[stored.dtype].itemsize
        for block in _blocks(elements, BLOCK_BYTES // item):
            start = block.start - elements.start
            target[start : start + len(block)].copy_(self._numbers(file, stored, block))
        return len(elements) * item

    def _read_columns(self, file: FileIO, stored: StoredTensor, part: Part, target: Tensor) -> int:
        """Read rows of a tensor and copy the part's columns of each into a vector."""
        row, item = math.prod(part.shape[1:]), TORCH_TYPES[stored.dtype].itemsize
        rows, inner = part.box[0], tuple(slice(side.start, side.stop) for side in part.box[1:])
        values = target.view([len(side) for side in part.box])
        for block in _blocks(rows, BLOCK_BYTES // (row * item)):
            numbers = self._numbers(file, stored, range(block.start * row, block.stop * row))
            start = block.start - rows.start
            read = numbers.view(len(block), *part.shape[1:])
            values[start : start + len(block)].copy_(read[(slice(None), *inner)])
        return len(rows) * row * item

    def _read_range_of_columns(
        self, file: FileIO, stored: StoredTensor, part: Part, flat: range, target: Tensor
    ) -> int:
        """Read the range ``flat`` of the flattened columns of ``part`` into a vector, from the rows that have it."""
        width = math.prod(map(len, part.box[1:]))
        first, last = flat.start // width, -(-flat.stop // width)
        rows = Part(part.shape, (part.box[0][first:last], *part.box[1:]))
        values = torch.empty(rows.num_elements, dtype=target.dtype)
        size = self._read_columns(file, stored, rows, values)
        target.copy_(values[flat.start - first * width : flat.stop - first * width])
        return size

    def _numbers(self, file: FileIO, stored: StoredTensor, elements: range) -> Tensor:
        """Return a range of the flattened tensor as a vector of the file's type, in the buffer."""
        dtype = TORCH_TYPES[stored.dtype]
        size = len(elements) * dtype.itemsize
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        view = self._buffer[:size].numpy().data
        file.seek(stored.start + elements.start * dtype.itemsize)
        while view.nbytes:
            count = file.readinto(view)
            if not count:
                raise UserError(f"{stored.file}: ends before its last tensor; copy it again")
            view = view[count:]
        return self._buffer[:size].view(dtype)


def _within(box: Box, outer: Box) -> Box:
    """Return the indices of ``box`` in a tensor of the elements of ``outer``."""
    sides = zip(box, outer, strict=True)
    return tuple(range(side.start - whole.start, side.stop - whole.start) for side, whole in sides)


def _elements(part: Part) -> range:
    """Return the elements of the flattened tensor that ``part`` is, which has whole rows."""
    first = part.box[0].start * math.prod(part.shape[1:]) if part.box else 0
    inside = range(part.num_elements) if part.flat is None else part.flat
    return range(first + inside.start, first + inside.stop)


def _blocks(whole: range, size: int) -> Iterator[range]:
    """Split a range into parts of ``size``, at least 1."""
    for start in range(whole.start, whole.stop, max(1, size)):
        yield range(start, min(start + max(1, size), whole.stop))
