"""The engine on plain PyTorch, on one rank: update rules, learning rates, 16-bit types, recomputing, offload."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    LENGTHS,
    engine_of,
    likelihood,
    mini_batch,
    output,
    placed,
    snapshot,
    squared_values,
    train,
    train_in_turn,
)
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from flexrlhf.engines.base import Batch
from flexrlhf.engines.models import load_model
from flexrlhf.engines.non_finite import NonFiniteStep
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.engines.torch.update import LossScale

DTYPES = ("float32", "bfloat16", "float16")
FAST = {"learning_rate": 0.01, "eps": 1e-4}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def close(first: dict[str, Tensor], second: dict[str, Tensor], tolerance: float) -> bool:
    return all(torch.allclose(first[name], second[name], rtol=tolerance, atol=tolerance) for name in first)


# --- the update rule, against transformers and torch alone


def plain_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Minus the mean log-prob of the response tokens, by one pass over all padded positions."""
    tokens, mask = batch["tokens"].long(), batch["attention_mask"].long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits[:, LENGTHS.prompt - 1 : -1]
    picked = logits.log_softmax(-1).gather(-1, tokens[:, LENGTHS.prompt :, None]).squeeze(-1)
    inside = batch["response_mask"].bool()
    return -picked[inside].mean()


def plain_training(optimizer: Any, limit: float | None, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after ``steps`` and the gradient norms before clipping."""
    model = load_model(placed(), 3)
    rule: Optimizer = optimizer(model.parameters())
    norms = []
    for seed in range(steps):
        rule.zero_grad()
        plain_loss(model, mini_batch(seed)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)))
        rule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (
            {"learning_rate": 0.01, "name": "adamw", "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1},
            lambda p: AdamW(p, lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
        ),
        (
            {"learning_rate": 0.01, "name": "adam", "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1},
            lambda p: Adam(p, lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
        ),
        (
            {"learning_rate": 0.2, "name": "sgd", "weight_decay": 0.1},
            lambda p: SGD(p, lr=0.2, weight_decay=0.1),
        ),
    ],
    ids=["adamw", "adam", "sgd"],
)
def test_three_updates_equal_torch(settings: dict[str, Any], optimizer: Any, limit: float | None) -> None:
    engine = engine_of(optimizer=settings | {"max_grad_norm": limit})
    before = snapshot(engine)
    statistics = train(engine, 3)
    weights, norms = plain_training(optimizer, limit, 3)
    assert close(engine.weights(), weights, 1e-5)
    assert not close(before, weights, 1e-3)
    assert [float(step["grad_norm"][1]) for step in statistics] == pytest.approx(norms, rel=1e-5)


def test_micro_batches_add_up() -> None:
    whole, single = (engine_of(optimizer=FAST, micro_batch_tokens=tokens) for tokens in (8192, 1))
    assert [float(step["grad_norm"][1]) for step in train(whole, 3)] == pytest.approx(
        [float(step["grad_norm"][1]) for step in train(single, 3)], rel=1e-5
    )
    assert close(whole.weights(), single.weights(), 1e-5)


def test_a_batch_may_have_smaller_passes_than_the_model() -> None:
    """Its results are to the last bit those of a model with such passes, in training and in inference."""
    whole, single = (engine_of(optimizer=FAST, micro_batch_tokens=tokens) for tokens in (8192, 12))
    batch = mini_batch()
    assert equal(whole.train([(replace(batch, tokens=12), likelihood())]), single.train([(batch, likelihood())]))
    assert equal(whole.weights(), single.weights())
    assert torch.equal(output(whole, "logprobs", batch=replace(batch, tokens=12)), output(single, "logprobs"))
    assert not torch.equal(output(whole, "logprobs"), output(single, "logprobs"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_backward_passes_add_up_as_in_one_call(dtype: str) -> None:
    """Whatever the model computes between them, to the last bit; a loss that is not finite is found in its part."""
    one, other = (engine_of(dtype=dtype, optimizer=FAST, micro_batch_tokens=12) for _ in range(2))
    for step in range(2):
        parts = [(mini_batch(step), likelihood()), (mini_batch(step + 10), likelihood(0.3))]
        statistics = train_in_turn(other, parts, lambda: output(other, "logprobs"))
        assert equal(statistics, one.train(parts))
    assert equal(other.weights(), one.weights())
    parts = [(mini_batch(), likelihood()), (mini_batch(), likelihood(math.inf))]
    if dtype == "float32":
        with pytest.raises(NonFiniteStep) as stopped:
            train_in_turn(other, parts, lambda: None)
        assert stopped.value.first is not None and stopped.value.first.part == 1


def test_an_update_without_rows_changes_nothing() -> None:
    engine = engine_of(optimizer={"name": "sgd", "learning_rate": 1.0})
    before = snapshot(engine)
    statistics = engine.train([(mini_batch().select(slice(0, 0)), likelihood())])
    assert equal(engine.weights(), before)
    assert statistics["grad_norm"].tolist() == [1, 0, 0]


# --- learning rates

STEPS = 8


def closed_form(schedule: str, warmup: int, step: int) -> float:
    """Fraction of the highest rate at optimizer step ``step`` of STEPS."""
    if step < warmup:
        return step / warmup
    done = (step - warmup) / (STEPS - warmup)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_rates_follow_the_formula_and_are_reported(schedule: str, warmup: int) -> None:
    settings = {"learning_rate": 0.5, "schedule": schedule, "warmup_steps": warmup}
    engine = engine_of(num_updates=STEPS, optimizer=settings)
    expected = [0.5 * closed_form(schedule, warmup, step) for step in range(STEPS)]
    found = [step["learning_rate"].tolist() for step in train(engine, STEPS)]
    assert found == [pytest.approx([1, rate, rate * rate]) for rate in expected]


def test_the_reported_rate_is_the_one_that_is_used() -> None:
    """Plain gradient descent moves by rate times norm."""
    settings = {"name": "sgd", "learning_rate": 0.5, "schedule": "linear", "warmup_steps": 1, "max_grad_norm": None}
    engine = engine_of(num_updates=4, optimizer=settings)
    for step in range(4):
        before = snapshot(engine)
        statistics = engine.train([(mini_batch(step), likelihood())])
        moved = sum(float((weight - before[name]).double().square().sum()) for name, weight in engine.weights().items())
        rate, norm = float(statistics["learning_rate"][1]), float(statistics["grad_norm"][1])
        assert math.sqrt(moved) == pytest.approx(rate * norm, rel=1e-4, abs=1e-9)


# --- recomputed activations


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputing_changes_no_number(dtype: str, role: str) -> None:
    """Nor does offloading of what is computed again from."""
    settings = {"activation_checkpointing": True, "offload_activations": dtype != "float16"}
    plain, recomputed = (engine_of(role, dtype=dtype, optimizer=FAST, **each) for each in ({}, settings))
    loss = likelihood() if role == "actor" else squared_values()
    assert [step["grad_norm"].tolist() for step in train(plain, 3, loss)] == [
        step["grad_norm"].tolist() for step in train(recomputed, 3, loss)
    ]
    assert equal(plain.weights(), recomputed.weights())


@pytest.mark.parametrize("further", [{}, {"activation_checkpointing": True}, {"lora": {"rank": 2}}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.01)])
def test_an_mlp_in_tiles_computes_the_same(dtype: str, tolerance: float, further: dict[str, Any]) -> None:
    """Passes of more tokens than there are hidden features, 16."""
    whole, tiled = (engine_of(dtype=dtype, optimizer=FAST, **further, tiled_mlp=on) for on in (False, True))
    assert torch.allclose(output(whole, "logprobs"), output(tiled, "logprobs"), atol=tolerance)
    norms = [[float(step["grad_norm"][1]) for step in train(each, 3)] for each in (whole, tiled)]
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)
    assert close(whole.weights(), tiled.weights(), tolerance)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_layers_run_again_in_the_backward_pass_alone(on: bool, tiled: bool) -> None:
    """And MLPs in tiles once for their gradients, with which a layer's own second pass has no product to compute."""
    engine = engine_of(optimizer=FAST, activation_checkpointing=on, tiled_mlp=tiled)
    seen: list[bool] = []
    layer, calls = engine._model.model.layers[0], 1 + (on or tiled)
    # before and not after it: recomputing ends as soon as the last saved tensor exists
    part = layer.mlp.gate_proj
    part.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    engine.train([(mini_batch(), likelihood())])
    tiles = 2 if tiled else 1
    assert seen == [False] * calls * tiles
    assert not any(module.training for module in engine._model.modules())
    seen.clear()
    output(engine, "logprobs")
    assert seen == [False] * tiles


# --- float16 and its loss scale


def test_float16_takes_normal_steps() -> None:
    half, full = engine_of(dtype="float16", optimizer=FAST), engine_of(optimizer=FAST)
    statistics = train(half, 3)
    assert [step["skipped"].tolist() for step in statistics] == [[1, 0, 0]] * 3
    assert [float(step["grad_norm"][1]) for step in statistics] == pytest.approx(
        [float(step["grad_norm"][1]) for step in train(full, 3)], rel=0.02
    )
    assert close(half.weights(), full.weights(), 0.01)


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    engine = engine_of(dtype="float16", num_updates=4, optimizer=FAST | {"schedule": "linear"})
    scale = engine._update._scale
    train(engine, 1)
    before, factor = snapshot(engine), scale.factor
    statistics = engine.train([(mini_batch(), likelihood(1e8))])
    assert equal(engine.weights(), before)
    assert scale.factor == factor / 2
    assert statistics["skipped"].tolist() == [1, 1, 1]
    assert statistics["grad_norm"].tolist() == [0, 0, 0]
    # the next step is a normal one, and its rate is the one that the skipped step had
    rates = [float(s["learning_rate"][1]) for s in (statistics, engine.train([(mini_batch(), likelihood())]))]
    assert rates == pytest.approx([0.0075, 0.0075])
    assert not equal(engine.weights(), before)


def test_after_overflows_the_update_is_that_of_another_scale() -> None:
    """The scale is taken out of the gradient again."""
    scaled, plain = (engine_of(dtype="float16", optimizer={"name": "sgd", "learning_rate": 0.1}) for _ in range(2))
    for _ in range(6):
        scaled.train([(mini_batch(), likelihood(1e8))])
    train(scaled, 2)
    train(plain, 2)
    assert close(scaled.weights(), plain.weights(), 1e-3)


def test_a_gradient_that_no_scale_can_mend_stops_the_run() -> None:
    engine = engine_of(dtype="float16", optimizer=FAST)
    before = snapshot(engine)
    with pytest.raises(FloatingPointError, match="not finite; the weights were left as they were"):
        for _ in range(20):
            engine.train([(mini_batch(), likelihood(math.inf))])
    assert equal(engine.weights(), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_scale_the_first_overflow_stops_the_run(dtype: str) -> None:
    engine = engine_of(dtype=dtype, optimizer=FAST)
    before = snapshot(engine)
    with pytest.raises(FloatingPointError, match="not finite; the weights were left as they were"):
        engine.train([(mini_batch(), likelihood(math.inf))])
    assert equal(engine.weights(), before)
    assert "skipped" not in engine_of(dtype=dtype, optimizer=FAST).train([(mini_batch(), likelihood())])


def test_the_scale_grows_again_after_good_steps() -> None:
    scale, good, bad = LossScale(True), torch.tensor(1.0), torch.tensor(math.nan)
    assert scale.factor == 2**16
    assert not scale.allows(bad)
    assert scale.factor == 2**15
    assert all(scale.allows(good) for _ in range(LossScale.GROWTH_INTERVAL - 1))
    assert scale.factor == 2**15
    assert scale.allows(good)
    assert scale.factor == 2**16
    assert not scale.allows(bad) and not scale.allows(bad)
    assert all(scale.allows(good) for _ in range(LossScale.GROWTH_INTERVAL))
    assert scale.factor == 2**15


def test_without_a_scale_the_factor_stays_one() -> None:
    scale = LossScale(False)
    assert all(scale.allows(torch.tensor(1.0)) for _ in range(2 * LossScale.GROWTH_INTERVAL))
    assert scale.factor == 1


# --- bfloat16 and its master weights


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_trained_model_keeps_float32_weights(dtype: str) -> None:
    engine = engine_of(dtype=dtype, optimizer=FAST)
    assert {weight.dtype for weight in engine.weights().values()} == {torch.float32}
    assert {parameter.dtype for parameter in engine._model.parameters()} == {getattr(torch, dtype)}
    assert equal(engine.weights(), engine_of(optimizer=FAST).weights())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_frozen_model_holds_16_bits_alone(dtype: str) -> None:
    engine = engine_of("ref", dtype=dtype)
    assert {weight.dtype for weight in engine.weights().values()} == {getattr(torch, dtype)}
    usage, full = engine.memory_usage(), engine_of("ref").memory_usage()
    assert (usage.weights, usage.gradients, usage.optimizer, usage.host) == (full.weights // 2, 0, 0, 0)


def test_positions_stay_in_float32() -> None:
    buffers = dict(engine_of("ref", dtype="bfloat16")._model.named_buffers())
    assert buffers and {buffer.dtype for buffer in buffers.values() if buffer.is_floating_point()} == {torch.float32}


def test_updates_too_small_for_bfloat16_add_up() -> None:
    """One step moves few weights by half a unit in the last place; twenty together change them as in float32."""
    settings = {"name": "sgd", "learning_rate": 2e-4, "max_grad_norm": None}
    low, full = engine_of(dtype="bfloat16", optimizer=settings), engine_of(optimizer=settings)
    before = snapshot(full)
    for engine in (low, full):
        engine.train([(mini_batch(), likelihood())])
    lost = [(weight.bfloat16() == before[name].bfloat16()) for name, weight in full.weights().items()]
    assert float(torch.cat([part.flatten() for part in lost]).float().mean()) > 0.95
    for engine in (low, full):
        for _ in range(19):
            engine.train([(mini_batch(), likelihood())])
    moved, expected = (
        torch.cat([(weight - before[name]).flatten() for name, weight in engine.weights().items()])
        for engine in (low, full)
    )
    assert float((moved - expected).norm() / expected.norm()) < 0.05
    live = dict(low._model.named_parameters())
    assert all(torch.equal(live[name].detach(), weight.bfloat16()) for name, weight in low.weights().items())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_copy_takes_the_rounded_weights(dtype: str) -> None:
    trained, copy = engine_of(dtype=dtype, optimizer=FAST), engine_of("ref", dtype=dtype)
    train(trained, 2)
    copy.load_weights({name: weight.to(getattr(torch, dtype)) for name, weight in trained.weights().items()})
    assert all(torch.equal(copy.weights()[name], w.to(getattr(torch, dtype))) for name, w in trained.weights().items())
    assert torch.equal(output(copy, "logprobs"), output(trained, "logprobs"))


# --- memory of a rank, and offloading it


@pytest.mark.parametrize(
    ("settings", "weights", "optimizer"),
    [
        ({}, 4, 8),
        ({"optimizer": {"name": "sgd"}}, 4, 0),
        ({"dtype": "bfloat16"}, 2, 4 + 8),
        ({"dtype": "float16"}, 2, 4 + 8),
    ],
    ids=str,
)
def test_bytes_for_each_parameter(settings: dict[str, Any], weights: int, optimizer: int) -> None:
    """Gradients and optimizer state exist after the first step; master weights count with the state."""
    engine = engine_of(**settings)
    count = sum(weight.numel() for weight in engine.weights().values())
    assert engine.memory_usage().gradients == 0
    train(engine, 1)
    usage = engine.memory_usage()
    assert (usage.weights, usage.gradients, usage.optimizer) == (weights * count, 4 * count, optimizer * count)


def memory(engine: TorchEngine) -> dict[int, int]:
    """Address → bytes of the storages of weights, master weights and optimizer states."""
    live = [parameter.detach() for parameter in engine._model.parameters()]
    optimizer = engine._update.state() if engine._update is not None else []
    storages = [tensor.untyped_storage() for tensor in (*live, *engine.weights().values(), *optimizer)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize("dtype", DTYPES)
def test_offloaded_tensors_return_unchanged(dtype: str) -> None:
    offloaded, other = engine_of(dtype=dtype, optimizer=FAST), engine_of(dtype=dtype, optimizer=FAST)
    for engine in (offloaded, other):
        train(engine, 2)
    before, size = snapshot(offloaded), sum(memory(offloaded).values())
    offloaded.offload()
    assert set(memory(offloaded).values()) == {0}
    assert offloaded.memory_usage().host == size
    offloaded.reload()
    assert offloaded.memory_usage().host == 0
    assert equal(offloaded.weights(), before)
    assert equal(offloaded.weights(), other.weights())
    for seed in (7, 8):
        statistics = [engine.train([(mini_batch(seed), likelihood())]) for engine in (offloaded, other)]
        assert [s["grad_norm"].tolist() for s in statistics] == [statistics[0]["grad_norm"].tolist()] * 2
        assert equal(offloaded.weights(), other.weights())
    assert torch.equal(output(offloaded, "logprobs"), output(other, "logprobs"))


def test_an_engine_may_be_offloaded_before_its_first_step_and_again() -> None:
    offloaded, other = engine_of(optimizer=FAST), engine_of(optimizer=FAST)
    for _ in range(2):
        offloaded.offload()
        offloaded.reload()
    assert equal(offloaded.weights(), other.weights())
    for engine in (offloaded, other):
        train(engine, 1)
    assert equal(offloaded.weights(), other.weights())


def test_a_frozen_copy_may_be_offloaded() -> None:
    engine = engine_of("ref")
    expected = output(engine, "ref_logprobs")
    engine.offload()
    assert set(memory(engine).values()) == {0}
    engine.reload()
    assert torch.equal(output(engine, "ref_logprobs"), expected)


def test_a_model_from_files_may_be_offloaded(tmp_path: Path) -> None:
    """Weights may be in the file's memory, which cannot be freed."""
    load_model(placed(), 3).save_pretrained(tmp_path)
    offloaded, other = engine_of(path=str(tmp_path), optimizer=FAST), engine_of(optimizer=FAST)
    offloaded.offload()
    assert set(memory(offloaded).values()) == {0}
    offloaded.reload()
    for engine in (offloaded, other):
        train(engine, 1)
    assert equal(offloaded.weights(), other.weights())


def test_offloading_twice_is_our_mistake() -> None:
    engine = engine_of("ref")
    engine.offload()
    with pytest.raises(AssertionError, match="already offloaded"):
        engine.offload()
