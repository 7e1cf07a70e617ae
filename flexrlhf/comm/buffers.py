"""Buffers of weights in flight, and reuse of their memory once they have arrived.

Fresh memory is mapped page by page when it is first written, which on a CPU takes as long as to send it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Buffers that are not in use."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a vector of ``size`` numbers of any value."""
        for index, buffer in enumerate(self._buffers):
            if (len(buffer), buffer.dtype, buffer.device) == (size, dtype, device):
                return self._buffers.pop(index)
        return torch.empty(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer of ``take``."""
        self._buffers.append(buffer)
