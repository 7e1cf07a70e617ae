"""Checksum that nearly every change of a tensor changes, also of its order, at about the cost of copying it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

_IN_CACHE, _ON_CUDA = 131071, 4194301
"""Words that are added at a time: few enough for a processor's cache, enough to keep a GPU busy.

Primes, so that rows that change places also change their places in the fold.
"""


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the bits of all values as 32-bit words, weighted by their places in row-major order: int64 ().

    The words wrap, so sign changes in pairs a fold apart go unnoticed; widening the words would take as long
    as sending them.
    """
    device = tensors[0].device
    fold = min(_longest_fold(device), max(1, *(-(-tensor.numel() * tensor.element_size() // 4) for tensor in tensors)))
    total = torch.zeros(fold, dtype=torch.int32, device=device)
    words = (_words(tensor.detach().reshape(-1)) for tensor in tensors)
    for number, piece in enumerate(chain.from_iterable(each.split(fold) for each in words)):
        total[: len(piece)].add_(piece, alpha=2 * number + 1)
    # odd weights, so that no bit of a sum is lost
    return (total * _odd_numbers(device)[:fold]).sum()


def _words(values: Tensor) -> Tensor:
    """Return the memory of a vector as int32; 16-bit values two by two, an odd one with a zero."""
    if values.element_size() == 4:
        return values.view(torch.int32)
    if len(values) % 2:
        values = torch.cat([values, values.new_zeros(1)])
    # a slice may begin in the middle of a word
    return (values.clone() if values.storage_offset() % 2 else values).view(torch.int32)


def _longest_fold(device: torch.device) -> int:
    return _ON_CUDA if device.type == "cuda" else _IN_CACHE


@lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(_longest_fold(device), dtype=torch.int64, device=device) * 2 + 1
