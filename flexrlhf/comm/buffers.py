"""Buffers of weights on their way, and the memory that those which have landed leave for the next ones.

Fresh memory is mapped page by page when it is first written, which on a CPU takes as long as to send it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class BufferPool:
    """Memory of buffers that have landed. ``capacity``: numbers of the longest buffer that will be asked for."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self.capacity = 0

    def packed(self, pieces: Sequence[Tensor]) -> Tensor:
        """The vectors ``pieces`` in one buffer."""
        size = sum(map(len, pieces))
        return torch.cat(list(pieces), out=self._taken(size, pieces[0])[:size])

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Hand back buffers that ``packed`` made; receivers that hold the same share one."""
        self._buffers += {buffer.data_ptr(): buffer for buffer in buffers}.values()

    def clear(self) -> None:
        self._buffers.clear()

    def _taken(self, size: int, like: Tensor) -> Tensor:
        for index, buffer in enumerate(self._buffers):
            if buffer.dtype == like.dtype and _room(buffer) >= size:
                return self._buffers.pop(index).as_strided((_room(buffer),), (1,), 0)
        return like.new_empty(max(size, self.capacity))


def _room(buffer: Tensor) -> int:
    """Numbers in all of the memory of which a bucket filled the first part."""
    return buffer.untyped_storage().nbytes() // buffer.element_size()
