"""Attention by the lengths of sequences against softmax under a dense mask: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexrlhf.engines.attended_spans import Span, has_flash
from flexrlhf.engines.attention import PassAttention, attend

LENGTHS = {
    "equal": (5, 5, 5),
    "some equal": (3, 7, 7, 7, 2),
    "one": (40,),
    "several blocks of a kernel": (300, 70, 70, 140),
}


def spans(lengths: tuple[int, ...]) -> list[Span]:
    """Sequences one behind the other."""
    return [(sum(lengths[:number]), length) for number, length in enumerate(lengths)]


def dense(query: Tensor, key: Tensor, value: Tensor, is_seen: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"]
)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["all keys", "groups"])
def test_kernels_of_the_gpu_compute_the_same(heads: tuple[int, int], padding: int, dtype: torch.dtype) -> None:
    """Flash attention's kernel for several lengths in 16 bits, torch's for equal lengths in float32."""
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    own, tokens, scale = spans((300, 70, 70, 140, 1)), 581, 0.125
    pass_attention = PassAttention.of(own, [(300, 281)], [(0, 300)])
    is_seen = torch.zeros(tokens + padding, tokens + padding, dtype=torch.bool, device=cuda)
    for start, length in own:
        is_seen[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
    is_seen[300:tokens, :300] = True
    counts = heads[0], heads[1], heads[1]
    inputs = [torch.randn(tokens + padding, count, 64, device=cuda).to(dtype).requires_grad_() for count in counts]
    whole = [tensor.detach().float().requires_grad_() for tensor in inputs]
    assert has_flash(inputs[0]) == (dtype != torch.float32)
    found, expected = attend(*inputs, pass_attention, scale), dense(*whole, is_seen, scale)
    weights = torch.randn(found.shape, device=cuda)
    gradients = torch.autograd.grad(found, inputs, weights.to(dtype)), torch.autograd.grad(expected, whole, weights)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    for one, two in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert float((one.float() - two).norm() / two.norm()) < limit


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "a shared prompt"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=["all keys", "groups", "one key head"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_sequences_attend_to_themselves_and_their_prompt(
    lengths: tuple[int, ...], heads: tuple[int, int], shares: bool
) -> None:
    """The first sequence is the prompt of all others; padding behind them attends to nothing."""
    torch.manual_seed(0)
    own, tokens, scale = spans(lengths), sum(lengths), 0.3
    answered = tokens - lengths[0]
    is_shared = shares and answered > 0
    pass_attention = PassAttention.of(own, [(lengths[0], answered)] if is_shared else [], [own[0]] if is_shared else [])
    is_seen = torch.zeros(tokens + 3, tokens + 3, dtype=torch.bool)
    for start, length in own:
        is_seen[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
    is_seen[lengths[0] : tokens, : lengths[0]] |= is_shared
    assert pass_attention.pairs == is_seen.sum()
    # as in a model, heads are neighbours in memory
    inputs = [torch.randn(tokens + 3, count, 8).requires_grad_() for count in (heads[0], heads[1], heads[1])]
    found, expected = attend(*inputs, pass_attention, scale), dense(*inputs, is_seen, scale)
    weights = torch.randn(found.shape)
    gradients = [torch.autograd.grad(out, inputs, weights) for out in (found, expected)]
    for one, two in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-5)
