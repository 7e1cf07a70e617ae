"""Attention by the lengths of sequences against softmax under a dense mask: outputs and gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from small_models import TINY, engine_of, likelihood, mini_batch, output
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flexrlhf.engines import attended_spans
from flexrlhf.engines.attended_spans import TokenSpan, has_flash
from flexrlhf.engines.attention import PassAttention, attend
from flexrlhf.engines.base import Batch, Sampling
from flexrlhf.engines.slots import ATTENTION

LENGTHS = {
    "equal": (5, 5, 5),
    "some equal": (3, 7, 7, 7, 2),
    "one": (40,),
    "several blocks of a kernel": (300, 70, 70, 140),
}


def spans(lengths: tuple[int, ...]) -> list[TokenSpan]:
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


# --- kernels for equal lengths

BY_SINKS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
KERNELS = {False: "_scaled_dot_product_flash_attention_for_cpu", True: "_scaled_dot_product_efficient_attention"}
"""For CPUs and CUDA, forward; with ``_backward`` behind them the ones of gradients."""


class CudaKernels(TorchDispatchMode):
    """Count calls of CUDA's kernels; raise where torch's kernel_forward.h or kernel_backward.h refuses a tensor."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(KERNELS[True]):
            backward = name != KERNELS[True]
            query, key, bias = (args[place] for place in ((1, 2, 4) if backward else (0, 1, 3)))
            multiple = 16 // query.element_size()
            for each in (each for each in args[: 6 if backward else 4] if each is not None):
                strides = [step for step, size in zip(each.stride()[:-1], each.shape[:-1], strict=True) if size > 1]
                assert each.dtype == query.dtype and each.stride(-1) == 1, name
                assert not any(step % multiple for step in (*strides, each.storage_offset())), (name, strides)
            assert bias is None or bias.shape == (*query.shape[:3], key.shape[2])
            assert not backward or args[6].is_contiguous() and args[6].shape[2] == -(-query.shape[2] // 32) * 32
            self._found["masked " * (bias is not None) + name] += 1
        return func(*args, **(kwargs or {}))


class SameOnCuda(TorchDispatchMode):
    """Repeat each call of a CPU's kernel with tensors of the same strides on a CUDA device that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name.startswith(KERNELS[False]):
            with FakeTensorMode(), CudaKernels(self.found):
                tensors = [_on_cuda(each) for each in args if isinstance(each, Tensor)]
                mask, causal = kwargs.get("attn_mask"), any(each is True for each in args)
                ours = attended_spans.dense if name == KERNELS[False] else attended_spans.dense_gradients
                ours(*tensors, causal, kwargs["scale"], None if mask is None else _on_cuda(mask))
        return func(*args, **kwargs)


def _on_cuda(like: Tensor) -> Tensor:
    whole = torch.empty(like.untyped_storage().nbytes() // like.element_size(), dtype=like.dtype, device="cuda:0")
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [BY_SINKS, {}], ids=["sinks", "packed"])
def test_the_kernels_of_cuda_take_the_tensors_of_all_passes(family: dict[str, Any], dtype: str) -> None:
    """Of a generation whose prompts and caches have any width, log-probs and training."""
    of = engine_of(init={**TINY, "head_dim": 16, **family}, dtype=dtype)
    batch = mini_batch()
    prompts = {"prompts": batch["tokens"][:, :4], "prompt_mask": batch["attention_mask"][:, :4]}
    sampling = Sampling(seed=1, step=0, temperature=1.0, eos_token_ids=(0,), pad_token_id=0)
    with SameOnCuda() as same:
        if family:
            of.generate(Batch(prompts, batch.rows, 1), sampling)
        output(of, "logprobs", batch=batch)
        of.backward([(batch, likelihood())])
    masked = "masked " * bool(family)
    assert set(same.found) == {masked + KERNELS[True], f"{masked}{KERNELS[True]}_backward"}


# --- prompts in slots


class GroupedHeads(TorchFunctionMode):
    """List the heads of keys and values in calls of torch's attention, and whether these are for grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.found.append((args[1].shape[1], args[2].shape[1], kwargs["enable_gqa"]))
        return torch.empty(args[0].shape)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "repeats"),
    [
        ("cpu", torch.float32, (0, 0), False),
        ("cuda:0", torch.float32, (9, 0), True),
        ("cuda:0", torch.float16, (7, 0), True),
        ("cuda:0", torch.bfloat16, (8, 0), False),
    ],
)
def test_keys_of_prompts_are_repeated_where_no_fused_kernel_takes_grouped_heads(
    device: str, dtype: torch.dtype, capability: tuple[int, int], repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 5, 16, dtype=dtype, device=device) for heads in (6, 2))
        with GroupedHeads() as attention:
            out, _ = ALL_ATTENTION_FUNCTIONS[ATTENTION](torch.nn.Module(), query, key, key, None)
    assert attention.found == [(6, 6, False) if repeats else (2, 2, True)]
    assert out.shape == (2, 5, 6, 16)
