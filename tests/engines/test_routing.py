"""Routers of models in 16 bits compute in float32, in every pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import TINY, engine_of, likelihood, mini_batch, output
from test_router_replay import FAMILIES, SAMPLING
from torch import Tensor
from torch.nn.functional import linear

from flexrlhf.engines.base import Batch
from flexrlhf.engines.routing import routers_of
from flexrlhf.engines.torch.engine import TorchEngine

Routed = tuple[Any, Tensor, tuple[Tensor, Tensor, Tensor]]


def exact(router: Any, hidden: Tensor) -> Tensor:
    logits = linear(hidden.reshape(-1, TINY["hidden_size"]).float(), router.weight.float())
    return logits + router.bias.float() if hasattr(router, "bias") else logits


def passes_of(of: TorchEngine, routed: list[Routed]) -> None:
    """Log-probs, generation and training."""
    batch = mini_batch()
    prompts = {"prompts": batch["tokens"][:, :4], "prompt_mask": batch["attention_mask"][:, :4]}
    output(of, "logprobs", batch=batch)
    of.generate(Batch(prompts, batch.rows, 1), SAMPLING)
    assert routed
    of.backward([(batch, likelihood())])


@pytest.mark.parametrize("family", [family for family in FAMILIES if " " not in family])
def test_logits_and_choice_are_those_of_float32(family: str) -> None:
    config = {**TINY, "model_type": family, **FAMILIES[family]}
    of, routed = engine_of(init=config, dtype="bfloat16"), list[Routed]()
    for router in routers_of(of._model):
        router.register_forward_hook(lambda router, given, result: routed.append((router, given[0], result)))
    passes_of(of, routed)
    differs = False
    for router, hidden, (logits, weights, chosen) in routed:
        assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
        assert torch.equal(logits, exact(router, hidden)) and weights.shape == chosen.shape
        if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss"):
            assert torch.equal(chosen.sort(1).values, logits.topk(router.top_k).indices.sort(1).values)
        differs |= not torch.equal(logits, logits.bfloat16().float())
    assert differs


def test_gradients_are_those_of_a_product_in_float32() -> None:
    of = engine_of(init={**TINY, "model_type": "mixtral", **FAMILIES["mixtral"]}, dtype="bfloat16")
    router, hidden = routers_of(of._model)[0], torch.randn(3, 5, TINY["hidden_size"]).bfloat16().requires_grad_()
    by_logits = torch.randn(15, router.num_experts)
    inputs = (hidden, router.weight)
    found = torch.autograd.grad(router(hidden)[0], inputs, by_logits)
    expected = torch.autograd.grad(exact(router, hidden), inputs, by_logits)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
