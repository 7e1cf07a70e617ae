"""A number that tells nearly every change of a tensor, also of its order, at about the cost of copying it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_FOLD = {"cpu": 32749, "cuda": 4194301}
"""Words that are added at a time: they stay in a processor's cache, or keep a GPU busy. Primes: rows that change places
have other places in the fold, too."""


def checksum(tensor: Tensor) -> Tensor:
    """The bits of the numbers as 32-bit words, weighed by their places in row-major order and added up. int64, 0-dim.

    The words wrap, so it misses signs that change in pairs at places ``_FOLD`` words apart; to widen them would take as
    long as to send them.
    """
    words = _words(tensor.detach().reshape(-1))
    fold = min(_FOLD[words.device.type], max(1, len(words)))
    total = torch.zeros(fold, dtype=torch.int32, device=words.device)
    for number, piece in enumerate(words.split(fold) if len(words) else ()):
        total[: len(piece)].add_(piece, alpha=2 * number + 1)
    return (total * _odd_numbers(fold, words.device)).sum()


def _words(values: Tensor) -> Tensor:
    """The memory of a vector as int32; 16-bit numbers two by two, an odd one with a zero."""
    if values.element_size() == 4:
        return values.view(torch.int32)
    if len(values) % 2:
        values = torch.cat([values, values.new_zeros(1)])
    # a slice may begin in the middle of a word
    return (values.clone() if values.storage_offset() % 2 else values).view(torch.int32)


def checksum_of(tensors: Iterable[Tensor]) -> Tensor:
    """That of a bucket: its tensors' by their places in it."""
    sums = torch.stack([checksum(tensor) for tensor in tensors])
    return (sums * _odd_numbers(len(sums), sums.device)).sum()


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Weights: odd, so that no bit of a sum is lost."""
    return _all_odd_numbers(device)[:count]


@lru_cache(maxsize=8)
def _all_odd_numbers(device: torch.device) -> Tensor:
    return torch.arange(_FOLD[device.type], dtype=torch.int64, device=device) * 2 + 1
