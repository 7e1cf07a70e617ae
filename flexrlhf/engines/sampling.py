"""Sample tokens with noise that depends on nothing but (seed, step, row, position).

argmax(logits / T + Gumbel noise) is a sample of softmax(logits / T) (Gumbel-max trick; Maddison et al. 2014). The noise
is a counter-based hash, the splitmix64 finaliser (Steele et al. 2014) on int64 tensors, so it is the same in every
batch, on every device and in every engine. A response ends at an end token, or where it completes a stop string.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from flexrlhf.engines.base import Sampling

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right logically; int64's own shift copies the sign bit."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def splitmix(x: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser."""
    x = shift_right(x, 30).bitwise_xor_(x).mul_(_MIX_1)
    x = shift_right(x, 27).bitwise_xor_(x).mul_(_MIX_2)
    return shift_right(x, 31).bitwise_xor_(x)


def place_hash(seed: int, step: int | Tensor, rows: Tensor, positions: int | Tensor) -> Tensor:
    """Return a hash, int64 of any sign, of each place.

    step:      of all rows, or int64, of each.
    rows:      int64, row numbers.
    positions: of the tokens, of a shape that broadcasts with ``rows``.
    """
    key = torch.full_like(rows, seed)
    for part in (torch.zeros_like(rows) + step, rows, torch.zeros_like(rows) + positions):
        key = splitmix(key * GOLDEN + part + 1)
    return key


def place_numbers(seed: int, step: int, rows: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Return a random number of 32 bits, int64, for each place. ``purpose``: sets them apart from those of samples."""
    return shift_right(splitmix(place_hash(seed, step, rows, positions) ^ purpose), 32)


def gumbel_noise(
    seed: int, step: int | Tensor, rows: Tensor, position: int | Tensor, vocabulary: int, has_kernel: bool = True
) -> Tensor:
    """Return Gumbel noise (n, vocabulary), float64.

    step:     of all rows, or int64 (n,) of each.
    rows:     int64 (n,), row numbers.
    position: decoding position of all rows, or int64 (n,) of each.
    has_kernel: whether GPUs make it by a kernel.
    """
    key = place_hash(seed, step, rows, position)
    if has_kernel and key.is_cuda and _has_triton():
        from flexrlhf.engines.noise_kernel import gumbel_noise_of

        return gumbel_noise_of(key, vocabulary)
    counters = torch.arange(vocabulary, device=rows.device, dtype=torch.int64)
    bits = shift_right(splitmix(key[:, None] + (counters[None, :] + 1) * GOLDEN), 12)
    # 52 bits: with 53 the largest would round to 1 and its noise to infinity
    uniform = bits.double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


@cache
def _has_triton() -> bool:
    """Return whether Triton is installed, and a compiler of C, with which it starts its kernels."""
    return find_spec("triton") is not None and any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def sample_tokens(
    logits: Tensor, sampling: Sampling, rows: Tensor, position: int | Tensor, step: int | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample the next token of every row.

    Returns tokens, int64 (n,), and their log-probs, float32 (n,), under the distribution that they are sampled from.

    logits:   (n, vocabulary), of any floating type.
    rows:     int64 (n,), row numbers.
    position: number of tokens that the responses have so far: of all rows, or int64 (n,) of each.
    step:     of the noise, int64 (n,) of each row; None: of ``sampling``.
    """
    step = sampling.step if step is None else step
    scores = _exclude_early_ends(logits.float(), sampling, position)
    if sampling.temperature == 0:
        tokens = scores[:, : sampling.num_ids].argmax(1)
    else:
        scores = scores.double().div_(sampling.temperature)
        scores = _apply_top_k_top_p(scores, sampling)
        noise = gumbel_noise(sampling.seed, step, rows, position, scores.shape[1], sampling.has_kernel)
        tokens = noise.add_(scores)[:, : sampling.num_ids].argmax(1)
        del noise  # frees it before logsumexp allocates as much
    sampled = scores.gather(1, tokens[:, None]).squeeze(1)
    return tokens, (sampled - scores.logsumexp(1)).float()


@contextmanager
def running_sums() -> Iterator[None]:
    """Allow ``cumsum`` of floating-point rows with ``debug.deterministic``.

    On GPUs torch refuses it then in any shape, though sums along several rows have a fixed order.
    """
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic)


def _exclude_early_ends(scores: Tensor, sampling: Sampling, position: int | Tensor) -> Tensor:
    """Set the scores of end tokens to -inf at positions before ``min_tokens``."""
    if not sampling.min_tokens:
        return scores
    is_end = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
    is_end[[token for token in sampling.eos_token_ids if token < len(is_end)]] = True
    early = torch.as_tensor(position, device=scores.device) < sampling.min_tokens
    return scores.masked_fill(early.view(-1, 1) & is_end, -torch.inf)


def _apply_top_k_top_p(scores: Tensor, sampling: Sampling) -> Tensor:
    """Set the scores of tokens outside ``top_k``, then of those outside ``top_p``, to -inf, in place."""
    if not sampling.top_k and sampling.top_p == 1:
        return scores
    # a cut among other tokens might leave none of these
    scores[:, slice(sampling.num_ids, None) if sampling.num_ids else slice(0)] = -torch.inf
    no_tokens = torch.empty(0, dtype=torch.int64)  # these warpers do not read them
    narrow = scores.float()  # sorting takes much memory, and other engines sort float32
    if sampling.top_k:
        narrow = TopKLogitsWarper(sampling.top_k)(no_tokens, narrow)
    if sampling.top_p < 1:
        with running_sums():
            narrow = TopPLogitsWarper(sampling.top_p)(no_tokens, narrow)
    return scores.masked_fill_(narrow.isneginf(), -torch.inf)


_REPLACEMENT = "\ufffd"
"""Character that decoders write for bytes that are no character, or not yet."""


def completes_stop(
    response: Sequence[int], sampling: Sampling, first: int = 0, stops: Sequence[str] | None = None
) -> bool:
    """Return whether the last token of ``response`` completes one of ``stops``, where no earlier one did.

    As in vLLM a stop string counts only if it is completed after the first ``min_tokens`` tokens. ``first``: tokens
    that are not searched, of turns before. ``stops``: None: those of ``sampling``.
    """
    decode, stops = sampling.decode, sampling.stop if stops is None else stops
    assert decode is not None, "stop strings are searched in decoded text"
    if len(response) <= sampling.min_tokens:
        return False
    response, least = response[first:], max(0, sampling.min_tokens - first)
    tail = _start_of_tail(response, decode, max(map(len, stops)))
    text, early = decode(response[tail:]), response[tail:least]
    num_early = len(decode(early).rstrip(_REPLACEMENT)) if early else 0
    return any(text.find(stop, max(0, num_early - len(stop) + 1)) >= 0 for stop in stops)


def _start_of_tail(response: Sequence[int], decode: Callable[[Sequence[int]], str], longest: int) -> int:
    """Return the start of a tail of ``response`` that contains any stop string which its last token completes.

    ``longest``: characters of the longest stop string. At the start of a tail decoders may drop a space or find no
    character; then the tail is doubled.
    """
    width = longest + 8
    while width < len(response):
        before = decode(response[-width:-1])
        if len(before) > longest and _REPLACEMENT not in before:
            return len(response) - width
        width *= 2
    return 0
