"""Kernels of a model's layers: attention as transformers has it, layers that torch compiles, and Liger's patch."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import TINY, placed
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import ModelSpec, OptimizerSpec
from flexrlhf.engines.attention import BY_SEQUENCES
from flexrlhf.engines.models import compile_layers, load_model, use_kernels
from flexrlhf.engines.optimizers import ScheduledOptimizer, make_optimizer
from flexrlhf.engines.sink_attention import SINK_ATTENTION, attention_with_sinks


def logits_of(model: PreTrainedModel) -> Tensor:
    tokens = torch.arange(24).view(2, 12) % 16
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 5:]


def test_attention_is_chosen_at_load_and_gives_the_same_results() -> None:
    named = {name: load_model(placed(attention=name), 3) for name in ("auto", "sdpa", "eager")}
    found = {name: model.config._attn_implementation for name, model in named.items()}
    assert found == {"auto": BY_SEQUENCES, "sdpa": "sdpa", "eager": "eager"}
    for model in named.values():
        assert torch.allclose(logits_of(model), logits_of(named["eager"]), atol=1e-5)


def test_attention_with_sinks_equals_the_eager_one() -> None:
    """With its gradients, those of sinks among them; one row has padding, and half of the layers a window."""
    found = {}
    for name in ("auto", "eager"):
        settings = ModelSpec(init={**TINY, "model_type": "gpt_oss", **FAMILIES["gpt_oss"]}, attention=name)
        model = load_model(replace(placed(), settings=settings), 3)
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.5)
        logits = logits_of(model)
        logits.square().mean().backward()
        kind = model.config._attn_implementation
        found[kind] = {
            "logits": logits.detach(),
            **{each: parameter.grad for each, parameter in model.named_parameters()},
        }
    ours, expected = found[SINK_ATTENTION], found["eager"]
    for name, tensor in expected.items():
        assert tensor is not None and ours[name] is not None
        assert torch.allclose(ours[name], tensor, atol=2e-6 * float(tensor.abs().max()), rtol=0), name


@pytest.mark.parametrize("window", [40, 7])
def test_attention_with_sinks_rounds_16_bits_twice_at_most(window: int) -> None:
    """Against float32 of the same values, by itself: a model's routers and norms magnify the rounding of a CPU."""
    found = []
    for function, dtype in ((attention_with_sinks, torch.bfloat16), (eager_attention_forward, torch.float32)):
        torch.manual_seed(3)
        query, key, value, sinks = inputs = [
            torch.randn(shape).bfloat16().to(dtype).requires_grad_()
            for shape in ((2, 8, 40, 16), (2, 2, 40, 16), (2, 2, 40, 16), (8,))
        ]
        seen = torch.ones(40, 40, dtype=torch.bool).tril().triu(1 - window).repeat(2, 1, 1, 1)
        seen[0, ..., :5] = False
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        module = SimpleNamespace(num_key_value_groups=4, sinks=sinks, training=False)
        out, _ = function(module, query, key, value, mask, scaling=0.25, s_aux=sinks)
        # queries of padding see no key
        (out * torch.randn(out.shape).bfloat16())[:, 5:].sum().backward()
        found.append([each.float() for each in (out[:, 5:].detach(), *(one.grad for one in inputs))])
    for ours, expected in zip(*found, strict=True):
        assert float((ours - expected).norm() / expected.norm()) < torch.finfo(torch.bfloat16).eps


def test_compiled_layers_keep_their_names_and_results() -> None:
    """Compiled by dynamo without device code, which would take a CPU's compiler minutes."""
    plain, compiled = load_model(placed(), 3), load_model(placed(), 3)
    compile_layers(compiled, backend="eager")
    assert list(plain.state_dict()) == list(compiled.state_dict())
    found, expected = logits_of(compiled), logits_of(plain)
    assert torch.allclose(found, expected, atol=1e-6)
    for logits in (found, expected):
        logits.square().sum().backward()
    for (name, one), two in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.allclose(one.grad, two.grad, atol=1e-5), name


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen3"), {"head_dim": 4}),
    "qwen2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), {**EXPERTS, "num_experts": 4}),
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 3},
    "glm4_moe": {**SHARED, "head_dim": 4, "use_qk_norm": True},
    "deepseek_v2": {**SHARED, **LATENT},
    "deepseek_v3": {**SHARED, **LATENT},
}


@pytest.mark.parametrize("kind", Families.KNOWN)
def test_norms_and_rotations_of_ours_give_the_same_results_and_gradients(kind: str) -> None:
    """All weights random, since a norm of ones has half of its gradients by chance."""
    settings = ModelSpec(init={**TINY, "model_type": kind, **FAMILIES.get(kind, {})})
    plain, ours = (load_model(replace(placed(), settings=settings), 3) for _ in range(2))
    use_kernels(ours, settings)
    used = []
    for model in (plain, ours):
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.5)
        loss = logits_of(model).square().mean()
        used.append(functions_of(loss))
        loss.backward()
    assert not {"_NormBackward", "_RotationBackward"} & used[0].keys()
    norms = sum("norm" in name for name, _ in ours.named_parameters())
    turned = 2 * TINY["num_hidden_layers"] if kind in Families.SERVED and kind not in Families.WITH_SINKS else 0
    assert (used[1]["_NormBackward"], used[1]["_RotationBackward"]) == (norms, turned)
    assert torch.equal(logits_of(ours), logits_of(plain))
    for (name, one), two in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-5 * float(one.grad.abs().max())), name


def functions_of(result: Tensor) -> Counter[str]:
    """Count the functions that autograd computes ``result`` by, by name."""
    found, seen = Counter[str](), {result.grad_fn}
    waiting = [result.grad_fn]
    while waiting:
        function = waiting.pop()
        found[function.name()] += 1
        more = {each for each, _ in function.next_functions if each is not None} - seen
        seen |= more
        waiting += more
    return found


def test_liger_changes_the_models_that_ask_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger itself needs a GPU; this test calls a library with its interface, which patches as Liger does."""
    model, calls = load_model(placed(), 3), []
    family = sys.modules[type(model).__module__]
    before = dict(vars(family))

    def patch(model: PreTrainedModel, **kernels: Any) -> None:
        calls.append(kernels)
        vars(family)["LlamaRMSNorm"] = torch.nn.LayerNorm

    package, library = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    vars(library)["_apply_liger_kernel_to_instance"] = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", library)
    use_kernels(model, ModelSpec())
    assert not calls
    use_kernels(model, ModelSpec(liger=True))
    assert calls == [
        {"rope": False, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
    ]
    assert vars(family) == before


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_the_fused_optimizer_steps_as_torchs_plain_one(name: str) -> None:
    settings = OptimizerSpec(name=name, learning_rate=1e-2, weight_decay=0.1)
    torch.manual_seed(0)
    start = [torch.randn(7, 5), torch.randn(0), torch.randn(33)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    made = make_optimizer(settings, ours)
    assert made.defaults["fused"]
    plain = (AdamW if name == "adamw" else torch.optim.Adam)(
        theirs, lr=1e-2, betas=settings.betas, eps=settings.eps, weight_decay=0.1, foreach=False, fused=False
    )
    for _ in range(3):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        made.step()
        plain.step()
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-6, atol=1e-7)
        for moment, values in ScheduledOptimizer(settings, made, 3).moments(one).items():
            assert torch.allclose(values, plain.state[two][moment], rtol=1e-6, atol=1e-7)
