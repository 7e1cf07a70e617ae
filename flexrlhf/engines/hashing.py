"""Hashes of places in a run: the splitmix64 finaliser (Steele et al. 2014) on int64 tensors, alike on every device."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; int64's own shift copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser."""
    x = shift_right(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = shift_right(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return shift_right(x, 31).bitwise_xor_(x)


def place_hash(seed: int, step: int, rows: Tensor, positions: int | Tensor) -> Tensor:
    """Return a hash, int64 of any sign, of each place.

    rows:      int64, row numbers.
    positions: of the tokens, of a shape that broadcasts with ``rows``.
    """
    key = torch.full_like(rows, seed)
    for part in (torch.full_like(rows, step), rows, torch.zeros_like(rows) + positions):
        key = mixed(key * GOLDEN + part + 1)
    return key
