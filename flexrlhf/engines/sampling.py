"""Sampling that depends on nothing but (seed, step, row, position): Gumbel noise from a counter-based hash.

argmax(logits / T + Gumbel) is a sample of softmax(logits / T) (Gumbel-max trick; Maddison et al. 2014). The hash is the
splitmix64 finaliser (Steele et al. 2014) on int64 tensors, so that batches, devices and engines draw the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

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


def gumbel_noise(seed: int, step: int, rows: Tensor, position: int | Tensor, vocabulary: int) -> Tensor:
    """Noise (len(rows), vocabulary), float64, for one decoding position, or for one int64 (len(rows),) of each row."""
    key = torch.full_like(rows, seed)
    for part in (torch.full_like(rows, step), rows, torch.zeros_like(rows) + position):
        key = _mix(key * _GOLDEN + part + 1)
    counters = torch.arange(vocabulary, device=rows.device, dtype=torch.int64)
    bits = _shift(_mix(key[:, None] + (counters[None, :] + 1) * _GOLDEN), 12)
    # 52 bits: with 53 the largest would round to 1 and its noise to infinity
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def sample_tokens(logits: Tensor, sampling: Sampling, rows: Tensor, position: int | Tensor) -> tuple[Tensor, Tensor]:
    """The next token (n,) of every row, and its log-prob (n,), float32, under the distribution it was drawn from.

    ``logits`` (n, vocabulary) of any floating type; ``rows``: global numbers; ``position``: tokens that an answer has
    already, of all rows or int64 (n,) of each.
    """
    scores = _without_early_ends(logits.float(), sampling, position)
    if sampling.temperature == 0:
        tokens = scores.argmax(1)
    else:
        scores = scores.double().div_(sampling.temperature)
        scores = _likeliest(scores, sampling)
        noise = gumbel_noise(sampling.seed, sampling.step, rows, position, scores.shape[1])
        tokens = noise.add_(scores).argmax(1)
        del noise  # or it would stand beside the sums below
    drawn = scores.gather(1, tokens[:, None]).squeeze(1)
    return tokens, (drawn - scores.logsumexp(1)).float()


def _without_early_ends(scores: Tensor, sampling: Sampling, position: int | Tensor) -> Tensor:
    """Probability 0 of end tokens before ``min_tokens``."""
    if not sampling.min_tokens:
        return scores
    is_end = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
    is_end[[token for token in sampling.eos_token_ids if token < len(is_end)]] = True
    early = torch.as_tensor(position, device=scores.device) < sampling.min_tokens
    return scores.masked_fill(early.view(-1, 1) & is_end, -torch.inf)


def _likeliest(scores: Tensor, sampling: Sampling) -> Tensor:
    """Probability 0 outside the ``top_k``, and of these outside ``top_p``."""
    if not sampling.top_k and sampling.top_p == 1:
        return scores
    no_text = torch.empty(0, dtype=torch.int64)  # which these warpers do not read
    narrow = scores.float()  # sorting needs much memory, and other engines sort float32
    if sampling.top_k:
        narrow = TopKLogitsWarper(sampling.top_k)(no_text, narrow)
    if sampling.top_p < 1:
        narrow = TopPLogitsWarper(sampling.top_p)(no_text, narrow)
    return scores.masked_fill_(narrow.isneginf(), -torch.inf)
