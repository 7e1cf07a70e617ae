"""Buffers of weights in flight, and reuse of their memory once they have arrived.

Fresh memory is mapped page by page when it is first written, which on a CPU takes as long as to send it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class BufferPool:
    """Memory of buffers that have arrived."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def packed(self, pieces: Sequence[Tensor], capacity: int) -> Tensor:
        """Return the vectors ``pieces`` in one buffer. ``capacity``: numbers that fresh memory has room for."""
        size = sum(map(len, pieces))
        return torch.cat(list(pieces), out=self._take(size, capacity, pieces[0])[:size])

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Take back buffers that ``packed`` made; receivers with the same contents share one."""
        self._buffers += {buffer.data_ptr(): buffer for buffer in buffers}.values()

    def clear(self) -> None:
        self._buffers.clear()

    def _take(self, size: int, capacity: int, like: Tensor) -> Tensor:
        for index, buffer in enumerate(self._buffers):
            if buffer.dtype == like.dtype and _room(buffer) >= size:
                return self._buffers.pop(index).as_strided((_room(buffer),), (1,), 0)
        return like.new_empty(max(size, capacity))


def _room(buffer: Tensor) -> int:
    """Numbers that the memory under ``buffer`` has room for; a bucket fills its first part."""
    return buffer.untyped_storage().nbytes() // buffer.element_size()
