"""Losses of routers: of the whole mini-batch, however its passes are composed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import LENGTHS, TINY, engine_of, likelihood, mini_batch, snapshot
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from flexrlhf.engines.base import Batch
from flexrlhf.engines.torch.engine import TorchEngine

AUXILIARY, SQUARES = 0.5, 0.1
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
        **{"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
        "num_key_value_heads": 4,
    },
}


def engine(family: str, **settings: Any) -> TorchEngine:
    optimizer = {"name": "sgd", "learning_rate": 1.0, "max_grad_norm": None}
    return engine_of(init={**TINY, "model_type": family, **FAMILIES[family]}, optimizer=optimizer, **settings)


def losses(of: TorchEngine, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Likelihood, and both losses of routers, from one sequence after the other; the auxiliary loss by transformers."""
    model, logits = of._model, list[list[Tensor]]()
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    for router in routers:
        logits.append([])
        router.register_forward_hook(lambda _, __, routed, kept=logits[-1]: kept.append(routed[0]))
    total = torch.zeros(())
    for row in range(len(batch)):
        text = batch["tokens"][row][batch["attention_mask"][row].bool()].long()
        first = len(text) - int(batch["response_mask"][row].sum())
        predicted = model(input_ids=text[None]).logits[0, first - 1 : -1].log_softmax(-1)
        total = total - predicted.gather(1, text[first:, None]).sum()
    of_layers = tuple(map(torch.cat, logits))
    auxiliary = load_balancing_loss_func(of_layers, 4, 2)
    assert isinstance(auxiliary, Tensor)
    return total / batch["response_mask"].sum(), auxiliary, torch.cat(of_layers).logsumexp(-1).square().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_the_whole_mini_batch_however_it_is_computed(family: str) -> None:
    plain, coefficients = engine(family), {"router_aux_loss_coef": AUXILIARY, "router_z_loss_coef": SQUARES}
    batch = mini_batch(rows=6)
    batch = Batch(batch.columns, batch.rows, 2)
    # both samples of a prompt have the same one
    for name in ("tokens", "attention_mask"):
        batch[name][1::2, : LENGTHS.prompt] = batch[name][::2, : LENGTHS.prompt]
    before = snapshot(plain)
    total, auxiliary, squares = losses(plain, batch)
    (total + AUXILIARY * auxiliary + SQUARES * squares).backward()
    expected = {
        name: before[name] - each.grad for name, each in plain._model.named_parameters() if each.grad is not None
    }
    for settings in ({}, {"micro_batch_tokens": 8}, {"share_prompts": False, "activation_checkpointing": True}):
        balanced = engine(family, **coefficients, **settings)
        of_loss = balanced.losses([(batch, likelihood())])
        found = balanced.train([(batch, likelihood())])
        for statistics in (of_loss, found):
            assert statistics["router_aux_loss"].tolist()[:2] == pytest.approx([1, float(auxiliary.detach())], rel=1e-5)
            assert statistics["router_z_loss"].tolist()[:2] == pytest.approx([1, float(squares.detach())], rel=1e-5)
        weighted = float(total) + AUXILIARY * float(auxiliary) + SQUARES * float(squares)
        assert float(of_loss["total_loss"][1]) == pytest.approx(weighted, rel=1e-5)
        for name, weights in snapshot(balanced).items():
            torch.testing.assert_close(weights, expected.get(name, before[name]), rtol=1e-5, atol=1e-6)


def test_each_mini_batch_of_a_step_has_losses_of_its_own() -> None:
    one, both = (engine("mixtral", router_aux_loss_coef=AUXILIARY, micro_batch_tokens=16) for _ in range(2))
    parts = [(mini_batch(seed, rows=3), likelihood()) for seed in (1, 2)]
    alone = [float(one.losses([part])["router_aux_loss"][1]) for part in parts]
    assert both.losses(parts)["router_aux_loss"].tolist()[:2] == pytest.approx([2, sum(alone)], rel=1e-6)
    assert both.train(parts)["router_aux_loss"].tolist()[:2] == pytest.approx([2, sum(alone)], rel=1e-6)


def test_rows_that_are_left_out_of_training_do_not_count() -> None:
    """A mini-batch of nothing else has no losses of routers."""
    whole = mini_batch(rows=6)
    mask = whole["response_mask"].clone()
    mask[2] = 0
    alone = whole.select(torch.tensor([0, 1, 3, 4, 5]))

    def found(batch: Batch) -> dict[str, Tensor]:
        of = engine("mixtral", router_aux_loss_coef=AUXILIARY, router_z_loss_coef=SQUARES)
        return {
            name: value
            for name, value in of.train([(batch, likelihood())]).items()
            if "router" in name or "expert" in name
        }

    left_out, expected = found(whole.with_columns({"loss_mask": mask})), found(alone)
    assert set(left_out) == set(expected) == {"router_aux_loss", "router_z_loss", "expert_load_max"}
    for name, values in expected.items():
        torch.testing.assert_close(left_out[name], values, rtol=1e-6, atol=0)
    of = engine("mixtral", router_aux_loss_coef=AUXILIARY, router_z_loss_coef=SQUARES)
    none = of.losses([(whole.with_columns({"loss_mask": torch.zeros_like(mask)}), likelihood())])
    assert not none["router_aux_loss"].any() and not none["router_z_loss"].any()
