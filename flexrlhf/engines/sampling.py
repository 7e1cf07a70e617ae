"""Sampling that depends on nothing but (seed, step, row, position): Gumbel noise from a counter-based hash.

argmax(logits / T + Gumbel) is a sample of softmax(logits / T) (Gumbel-max trick; Maddison et al. 2014). The hash is the
splitmix64 finaliser (Steele et al. 2014) on int64 tensors, so that batches, devices and engines draw the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from flexrlhf.engines.base import Sampling

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: the arithmetic one drags the sign bit along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def gumbel_noise(seed: int, step: int, rows: Tensor, position: int, vocabulary: int) -> Tensor:
    """Noise (len(rows), vocabulary), float64, for one decoding position."""
    key = torch.full_like(rows, seed)
    for part in (torch.full_like(rows, step), rows, torch.full_like(rows, position)):
        key = _mix(key * _GOLDEN + part + 1)
    counters = torch.arange(vocabulary, device=rows.device, dtype=torch.int64)
    bits = _shift(_mix(key[:, None] + (counters[None, :] + 1) * _GOLDEN), 12)
    # 52 bits: with 53 the largest would round to 1 and its noise to infinity
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


class GumbelProcessor(LogitsProcessor):
    """Turns greedy decoding into exact sampling at ``sampling.temperature``."""

    def __init__(self, sampling: Sampling, rows: Tensor, prompt_width: int) -> None:
        self._sampling = sampling
        self._rows = rows
        self._prompt_width = prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        position = input_ids.shape[1] - self._prompt_width
        noise = gumbel_noise(self._sampling.seed, self._sampling.step, self._rows, position, scores.shape[1])
        return (scores.double() / self._sampling.temperature + noise).float()
