"""Packed rows, shared prompts and divided groups compute the same as separate rows: every output, every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from both_heads import shared
from small_models import TINY, engine_for, likelihood, mini_batch, placed, squared_values
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flexrlhf.config.algorithms.supervised import DpoSpec
from flexrlhf.config.model_settings import Head, OptimizerSpec
from flexrlhf.engines.base import Batch, Loss, Outputs, Totals
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.objectives.preferences import preference_loss
from flexrlhf.operators.columns import Column, Lengths

SAMPLES = 3
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "apart": {"pack_texts": False},
    "packed": {"share_prompts": False},
    "shared": {},
    "in small passes": {"micro_batch_tokens": 24},
    "text by text": {"micro_batch_tokens": 1},
    "apart, text by text": {"micro_batch_tokens": 1, "pack_texts": False},
}
PACKING = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = ("gemma2", "gpt2", "gpt_oss")
OWN: Mapping[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 32}
STILL = OptimizerSpec(name="sgd", learning_rate=1.0, max_grad_norm=None)


def engine_with(family: str, head: Head, layout: str, **settings: Any) -> TorchEngine:
    init = (
        {"model_type": "gpt2", **GPT2}
        if family == "gpt2"
        else {**TINY, "model_type": family, "head_dim": 4} | OWN.get(family, {})
    )
    model = placed("actor" if head != "scalar" else "critic", head, optimizer={}, **LAYOUTS[layout], **settings)
    return engine_for(replace(model, settings=model.settings.model_copy(update={"init": init, "optimizer": STILL})))


def groups(seed: int = 0, prompts: int = 4) -> Batch:
    """Rows of ``SAMPLES`` responses to each prompt."""
    batch = mini_batch(seed, prompts * SAMPLES)
    columns = dict(batch.columns)
    for name in ("tokens", "attention_mask"):
        columns[name] = columns[name].clone()
        columns[name][:, :4] = columns[name][::SAMPLES, :4].repeat_interleave(SAMPLES, 0)
        # two samples of the first prompt are the same
        columns[name][1] = columns[name][0]
    columns["response_mask"] = columns["attention_mask"][:, 4:]
    return Batch(columns, batch.rows, SAMPLES)


def with_entropy() -> Loss:
    """The mean log-prob and half the mean entropy of the response tokens."""

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Any]:
        assert outputs.entropy is not None
        return ((outputs.quantity + 0.5 * outputs.entropy) * batch.mask).sum() / totals.tokens, {}

    return Loss("logprobs", function, (), entropy="gradient")


def squared_scores() -> Loss:
    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Any]:
        return (outputs.quantity - 1).square().sum() / totals.sequences, {}

    return Loss("scores", function, ())


LOSSES = {"causal": [with_entropy()], "scalar": [squared_values(), squared_scores()], "both": [shared()]}
OUTPUTS = {"causal": ("logprobs",), "scalar": ("values", "scores", "token_scores"), "both": ("logprobs", "values")}


def results(engine: TorchEngine, head: Head, compares: bool = False) -> dict[str, Tensor]:
    """Outputs of the model, and the change of each weight by an update of plain gradient descent."""
    found = engine.forward(groups(), [Column.of(name) for name in OUTPUTS[head]])
    for number, loss in enumerate(LOSSES[head]):
        before = {name: weight.clone() for name, weight in engine.weights().items()}
        engine.train([(replace(groups(number + 1), compares=compares), loss)])
        found |= {f"{name} by loss {number}": before[name] - weight for name, weight in engine.weights().items()}
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1e-3, float(tensor.abs().max()))
        assert float((found[name] - tensor).abs().max()) <= tolerance * scale, name
        # the bias of keys changes no attention
        assert tensor.abs().max() > 0 or "bias" in name, f"{name} is 0"


@pytest.mark.parametrize("head", ["causal", "scalar", "both"])
@pytest.mark.parametrize("family", PACKING)
def test_all_layouts_have_the_same_outputs_and_gradients(family: str, head: Head) -> None:
    expected = results(engine_with(family, head, "apart"), head, compares=True)
    for layout in LAYOUTS:
        assert_equal(results(engine_with(family, head, layout), head), expected, 2e-5)
    assert_equal(results(engine_with(family, head, "text by text"), head, compares=True), expected, 2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compares", [True, False])
def test_a_pass_has_whole_groups_only_if_a_loss_compares_them(layout: str, compares: bool) -> None:
    seen: list[list[int]] = []

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Any]:
        seen.append(batch.rows.tolist())
        return outputs.quantity.sum() / totals.tokens, {}

    batch = replace(groups(), compares=compares)
    engine_with("llama", "causal", layout).train([(batch, Loss("logprobs", function, ()))])
    assert sorted(row for rows in seen for row in rows) == list(range(4 * SAMPLES))
    if compares:
        assert all(rows[::SAMPLES] == [row for row in rows if row % SAMPLES == 0] for rows in seen)
    if "text by text" in layout:
        # equal sequences are computed once
        assert len(seen) == (4 if compares else 4 * SAMPLES - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["causal", "scalar"])
def test_sequences_of_an_episode_are_computed_as_if_each_were_alone(layout: str, head: Head) -> None:
    """Two samples of a prompt with three sequences each: the first ones have the prompt in common, some further ones
    are not used."""
    batch, unused = groups(prompts=4), torch.tensor([2, 4, 10])
    columns = {name: values.clone() for name, values in batch.columns.items()}
    for values in columns.values():
        values[unused] = 0
    columns["tokens"][3::6, :4] = columns["tokens"][::6, :4]
    columns["attention_mask"][3::6, :4] = columns["attention_mask"][::6, :4]
    columns["tokens"][1::3, :4] = columns["tokens"][1::3, :4].flip(1)
    together = Batch(columns, batch.rows, 6, sequences=3)
    used = torch.tensor([row for row in range(12) if row not in unused])
    alone = replace(together.select(used), samples_per_prompt=1, sequences=1)
    found = []
    for each, engine in ((together, engine_with("llama", head, layout)), (alone, engine_with("llama", head, "apart"))):
        names, before = OUTPUTS[head][:1], {name: values.clone() for name, values in engine.weights().items()}
        output = engine.forward(each, [Column.of(name) for name in names])[names[0]]
        engine.train([(each, LOSSES[head][0])])
        changes = {name: before[name] - weight for name, weight in engine.weights().items()}
        found.append({"output": output[used] if each is together else output, **changes})
    assert_equal(*found, 2e-5)


def test_pairs_stay_in_one_pass() -> None:
    """Whatever the budget: DPO's loss compares two responses."""
    batch = mini_batch(rows=8)
    logprobs = torch.linspace(-2, -1, batch.mask.numel()).view(batch.mask.shape)
    pairs = Batch({**batch.columns, "ref_logprobs": logprobs}, batch.rows, 2, compares=True)
    found = []
    for layout in ("shared", "text by text"):
        engine = engine_with("llama", "causal", layout)
        statistics = engine.train([(pairs, preference_loss(DpoSpec()))])
        found.append({**engine.weights(), "margins": statistics["preference_margin"]})
    assert_equal(found[1], found[0], 2e-5)


@pytest.mark.parametrize("family", OTHERS)
def test_families_that_do_not_pack_compute_rows_apart(family: str) -> None:
    """Their values equal the ones computed one row at a time, whose logits are cut off before the response."""
    expected = results(engine_with(family, "causal", "apart", micro_batch_tokens=1), "causal")
    assert_equal(results(engine_with(family, "causal", "shared"), "causal"), expected, 2e-5)


@pytest.mark.parametrize(
    "settings",
    [{"activation_checkpointing": True}, {"lora": {"rank": 2}}, {"logits_mb": 0.0003}],
    ids=["recomputed", "adapters", "logits in parts"],
)
def test_layouts_go_with_other_settings(settings: dict[str, Any]) -> None:
    apart, together = (engine_with("llama", "causal", layout, **settings) for layout in ("apart", "shared"))
    found, expected = (engine.forward(groups(), [Column.of("logprobs")])["logprobs"] for engine in (together, apart))
    assert torch.allclose(found, expected, atol=1e-5)
    norms = [float(engine.train([(groups(), likelihood())])["grad_norm"][1]) for engine in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype: str) -> None:
    apart, together = (engine_with("qwen2", "causal", layout, dtype=dtype) for layout in ("apart", "shared"))
    found, expected = (engine.forward(groups(), [Column.of("logprobs")])["logprobs"] for engine in (together, apart))
    assert torch.allclose(found, expected, atol=0.05)
    assert torch.isfinite(torch.tensor(float(together.train([(groups(), likelihood())])["grad_norm"][1])))


def test_a_shared_prompt_saves_flops_in_training() -> None:
    """GRPO with 8 samples, prompts of 512 tokens and responses of 64: at least 2.5 times fewer."""
    lengths = Lengths(512, 64)
    tokens = torch.randint(0, 32, (16, lengths.total), dtype=torch.int32)
    tokens[:, :512] = tokens[::8, :512].repeat_interleave(8, 0)
    ones = torch.ones(16, lengths.total, dtype=torch.uint8)
    batch = Batch(
        {"tokens": tokens, "attention_mask": ones, "response_mask": ones[:, 512:]},
        torch.arange(16),
        samples_per_prompt=8,
    )
    flops = {}
    for layout in ("apart", "shared"):
        model = placed("actor", **LAYOUTS[layout])
        model = replace(model, settings=model.settings.model_copy(update={"init": {**TINY, "hidden_size": 64}}))
        engine = engine_for(model, lengths=lengths)
        with FlopCounterMode(display=False) as counter:
            engine.train([(batch, likelihood())])
        flops[layout] = counter.get_total_flops()
    assert flops["apart"] >= 2.5 * flops["shared"]
