"""Low-rank adapters in an engine: they alone are trained, can be disabled, and are saved as peft reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    SEED,
    TINY,
    engine_for,
    engine_of,
    likelihood,
    mini_batch,
    placed,
    snapshot,
    squared_values,
    train,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from flexrlhf.engines.base import Loss
from flexrlhf.engines.models import load_model
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import COLUMNS
from flexrlhf.runs.export import TrainedModel
from flexrlhf.runs.model_directory import ModelDirectory, SavedAdapters

peft = pytest.importorskip("peft")

LORA: dict[str, Any] = {"rank": 2, "alpha": 6}
FAST = {"learning_rate": 0.05}
EXPERTS = {
    **TINY,
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "mlp_only_layers": [0],
}


def loss_of(role: str) -> Loss:
    return likelihood() if role == "actor" else squared_values()


def trained_engine(role: str = "actor", steps: int = 3, **settings: Any) -> TorchEngine:
    engine = engine_of(role, optimizer=FAST, **{"lora": LORA, **settings})
    train(engine, steps, loss_of(role))
    return engine


def output(engine: TorchEngine, column: str, adapters: bool = True) -> Tensor:
    return engine.forward(mini_batch(9), [COLUMNS[column]], adapters)[column]


# --- trained weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_only_adapters_and_the_scalar_head_change(role: str, dtype: str) -> None:
    engine = engine_of(role, optimizer=FAST, lora=LORA, dtype=dtype)
    before = snapshot(engine)
    train(engine, 3, loss_of(role))
    changed = {name for name, weight in engine.weights().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name or name == "score.weight"}
    assert ("score.weight" in changed) == (role == "critic")


def test_only_trained_weights_have_float32_copies_gradients_and_state() -> None:
    engine = trained_engine(dtype="bfloat16", steps=1)
    kinds = {name: weight.dtype for name, weight in engine.weights().items()}
    assert all((kind == torch.float32) == (".lora_" in name) for name, kind in kinds.items())
    trained = sum(weight.numel() for weight in engine.weights().values() if weight.dtype == torch.float32)
    total = sum(weight.numel() for weight in engine.weights().values())
    usage = engine.memory_usage()
    assert (usage.weights, usage.gradients, usage.optimizer) == (2 * total, 4 * trained, (4 + 8) * trained)


@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"micro_batch_tokens": 1}], ids=str)
def test_adapters_are_trained_alike_in_other_ways_to_compute(settings: dict[str, Any]) -> None:
    plain, other = trained_engine(), trained_engine(**settings)
    for name, weight in plain.weights().items():
        assert torch.allclose(other.weights()[name], weight, rtol=1e-4, atol=1e-5), name


# --- with and without


def test_fresh_adapters_change_nothing() -> None:
    assert torch.equal(output(trained_engine(steps=0), "logprobs"), output(engine_of(), "logprobs"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_adapters_a_trained_policy_is_the_model_that_it_began_as(dtype: str) -> None:
    engine, reference = trained_engine(dtype=dtype), engine_of("ref", dtype=dtype)
    expected = output(reference, "ref_logprobs")
    with_adapters = output(engine, "logprobs")
    assert torch.equal(output(engine, "ref_logprobs", adapters=False), expected)
    assert not torch.allclose(with_adapters, expected, atol=0.01)
    # and they are there again
    assert torch.equal(output(engine, "logprobs"), with_adapters)


def test_training_goes_on_after_a_look_without_adapters() -> None:
    looked, other = trained_engine(), trained_engine()
    output(looked, "ref_logprobs", adapters=False)
    for engine in (looked, other):
        train(engine, 1)
    assert all(torch.equal(weight, other.weights()[name]) for name, weight in looked.weights().items())


def test_adapters_may_be_offloaded_with_their_base() -> None:
    offloaded, other = trained_engine(), trained_engine()
    offloaded.offload()
    assert {weight.untyped_storage().nbytes() for weight in offloaded.weights().values()} == {0}
    offloaded.reload()
    for engine in (offloaded, other):
        train(engine, 1)
    assert all(torch.equal(weight, other.weights()[name]) for name, weight in offloaded.weights().items())


def test_a_copy_takes_the_adapters_alone() -> None:
    """Adapters as a Sync delivers them."""
    engine, copy = trained_engine(), engine_of("ref", lora=LORA)
    copy.load_weights({name: weight for name, weight in engine.weights().items() if ".lora_" in name})
    assert torch.equal(output(copy, "logprobs"), output(engine, "logprobs"))


# --- saved


def base_directory(role: str, directory: Path, **settings: Any) -> str:
    """The model before training, as transformers writes it."""
    load_model(placed(role, **settings), SEED).save_pretrained(directory / "base")
    return str(directory / "base")


def saved(engine: TorchEngine, directory: Path, **settings: Any) -> Path:
    weights = {
        name: w.contiguous() for name, w in engine.weights().items() if ".default." in name or name == "score.weight"
    }
    ModelDirectory(directory / "actor").save_adapters(weights, placed("actor", **settings).settings)
    return directory / "actor"


def with_peft(kind: Any, base: str, adapters: Path, **extra: Any) -> PreTrainedModel:
    model = kind.from_pretrained(base, dtype=torch.float32, **extra)
    found: PreTrainedModel = peft.PeftModel.from_pretrained(model, str(adapters)).eval()
    return found


TEXT = torch.randint(0, TINY["vocab_size"], (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("init", "targets"),
    [
        (TINY, None),
        (TINY, ("q_proj", "down_proj")),
        (EXPERTS, ("v_proj", "gate_up_proj", "down_proj")),
        (TINY | {"model_type": "mixtral", "num_local_experts": 3}, ("down_proj",)),
    ],
    ids=["all", "some", "experts", "experts alone"],
)
def test_peft_loads_a_saved_policy(init: dict[str, Any], targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    base = base_directory("actor", tmp_path, init=init)
    lora = LORA | {"targets": targets}
    engine = trained_engine(path=base, lora=lora)
    adapters = saved(engine, tmp_path, path=base, lora=lora)
    with torch.no_grad():
        expected = engine._model(input_ids=TEXT).logits
        loaded = with_peft(AutoModelForCausalLM, base, adapters)(input_ids=TEXT).logits
        alone = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(input_ids=TEXT).logits
        # the directory names its base, too
        found = peft.AutoPeftModelForCausalLM.from_pretrained(str(adapters), dtype=torch.float32)(input_ids=TEXT).logits
    assert torch.allclose(loaded, expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(alone, expected, atol=0.01)
    assert_read_back(engine, adapters)
    # a run that has ended without a checkpoint
    lines = ["name: run", "algorithm: {name: sft, prompts_per_step: 2}", "cluster: {devices: 1}"]
    lines.append(f"models: {{actor: {{path: {base}, lora: {json.dumps(lora)}}}}}")
    lines.append("data: {path: rows.jsonl, max_prompt_tokens: 4, max_response_tokens: 4}")
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    TrainedModel.find(tmp_path, None).export(tmp_path / "merged", True, "auto")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=TEXT).logits
    assert torch.allclose(merged, expected, rtol=1e-5, atol=1e-6)


def assert_read_back(engine: TorchEngine, adapters: Path) -> None:
    """Check that adapters are read under the names of the parameters, with the same values."""
    found, weights = SavedAdapters("actor", adapters), engine.weights()
    assert {*found.names} == {name for name in weights if ".default." in name or name == "score.weight"}
    assert all(torch.equal(found.tensor(name), weights[name]) for name in found.names)


def test_peft_loads_a_saved_critic_with_its_head(tmp_path: Path) -> None:
    base = base_directory("critic", tmp_path)
    engine = trained_engine("critic", path=base)
    adapters = saved(engine, tmp_path, path=base, lora=LORA)
    mask = torch.ones_like(TEXT)
    with torch.no_grad():
        expected = engine._model(input_ids=TEXT, attention_mask=mask, position_ids=mask.cumsum(1) - 1)
        loaded = with_peft(AutoModelForSequenceClassification, base, adapters, num_labels=1)
        hidden = loaded.base_model.model.model(input_ids=TEXT).last_hidden_state
        scores = loaded.base_model.model.score(hidden).squeeze(-1)
        plain = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
        before = plain.score(plain.model(input_ids=TEXT).last_hidden_state).squeeze(-1)
    assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before, expected, atol=0.01)
    assert_read_back(engine, adapters)
    assert SavedAdapters("critic", adapters).gives_scores


def test_saved_adapters_hold_nothing_of_the_base(tmp_path: Path) -> None:
    from safetensors import safe_open

    adapters = saved(trained_engine(), tmp_path, lora=LORA)
    assert {file.name for file in adapters.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with safe_open(adapters / "adapter_model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * 7 * TINY["num_hidden_layers"]
    assert all(".lora_" in name and "default" not in name for name in names)


# --- trained on


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_training_goes_on_with_saved_adapters(role: str, dtype: str, tmp_path: Path) -> None:
    """It starts with their values, saves adapters of the same base, and keeps their policy as the reference."""
    base = base_directory(role, tmp_path)
    first = trained_engine(role, path=base, dtype=dtype)
    path = str(saved(first, tmp_path, path=base, lora=LORA))
    model = placed(role, path=path, lora=LORA | {"new": False}, optimizer=FAST, dtype=dtype)
    engine = engine_for(replace(model, keeps_start=True))
    column = "logprobs" if role == "actor" else "values"
    expected = output(first, column)
    assert torch.equal(output(engine, column), expected)
    merged = output(engine_of(role, path=path, dtype=dtype), column)
    assert torch.allclose(merged, expected, atol=1e-5 if dtype == "float32" else 0.1)
    train(engine, 3, loss_of(role))
    assert not torch.allclose(output(engine, column), expected, atol=0.01)
    if role == "actor":
        assert torch.equal(output(engine, "ref_logprobs", adapters=False), expected)
    names = {name for name, _ in first._model.named_parameters()}
    copies = {name for name in engine.weights() if ".start." in name}
    assert engine.weights().keys() - copies == names and len(copies) == 2 * 7 * TINY["num_hidden_layers"]
    again = saved(engine, tmp_path / "again", path=path, lora=LORA | {"new": False})
    assert json.loads((again / "adapter_config.json").read_text())["base_model_name_or_path"] == base
