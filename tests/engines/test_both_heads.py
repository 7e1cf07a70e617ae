"""A policy and its critic on one trunk: the same results as from two models, however it computes, saves and loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from both_heads import CASES, COLUMNS_OF_BOTH, INIT, UPDATES, USUAL, has_all_rows, parts_of, prompts, sampling, shared
from forked import run_ranks
from small_models import (
    LENGTHS,
    SEED,
    TINY,
    engine_for,
    engine_of,
    likelihood,
    mini_batch,
    output,
    placed,
    snapshot,
    squared_values,
    train,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from flexrlhf.config.model_families import Families
from flexrlhf.config.model_settings import Head, LoraSpec, ModelSpec
from flexrlhf.engines.base import Batch, Loss, Moments, Outputs, Totals
from flexrlhf.engines.models import load_model
from flexrlhf.engines.scalar_head import HeadsOutput, saved_value_head
from flexrlhf.engines.torch.engine import TorchEngine
from flexrlhf.operators.columns import Column
from flexrlhf.placement.layout import Layout
from flexrlhf.placement.placed import ModelName, PlacedModel
from flexrlhf.runs.model_directory import ModelDirectory
from flexrlhf.weights.shapes import model_shape

peft = pytest.importorskip("peft")

FAST = {"learning_rate": 0.01, "eps": 1e-4}
PLAIN = {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": None}
LORA = {"rank": 2, "alpha": 4}
BOTH = COLUMNS_OF_BOTH


def trunk(role: str = "actor", **settings: Any) -> TorchEngine:
    return engine_of(role, head="both", **settings)


def trunk_of(init: dict[str, Any], **settings: Any) -> TorchEngine:
    """``settings`` as sections."""
    model = PlacedModel(ModelName("actor"), Layout((0,)), True, ModelSpec(init=init, **settings), head="both")
    return engine_for(model)


def apart(engine: TorchEngine, **settings: Any) -> tuple[TorchEngine, TorchEngine]:
    """A causal and a scalar model with the weights of ``engine``."""
    weights = engine.weights()
    policy, critic = engine_of(**settings), engine_of("critic", **settings)
    for model in (policy, critic):
        model.load_weights({name: weights[name] for name in model.weights()})
    return policy, critic


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_columns_equal_two_models(dtype: str) -> None:
    engine = trunk("ref", dtype=dtype)
    policy, critic = (
        engine_of(role, head=head, dtype=dtype) for role, head in (("ref", "causal"), ("reward", "scalar"))
    )
    for model in (policy, critic):
        model.load_weights({name: engine.weights()[name] for name in model.weights()})
    found = engine.forward(mini_batch(), BOTH)
    assert list(found) == ["logprobs", "values"]
    assert torch.equal(found["logprobs"], output(policy, "logprobs"))
    assert torch.equal(found["values"], output(critic, "values"))
    assert found["logprobs"].any() and found["values"].any()


def test_columns_take_one_pass_over_the_trunk_and_no_more_heads_than_they_need() -> None:
    engine = trunk()
    seen: list[str] = []
    for name, module in (
        ("trunk", engine._model.model),
        ("head", engine._model.lm_head),
        ("value", engine._model.score),
    ):
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    for columns, called in (
        (BOTH, ["trunk", "value", "head"]),
        (BOTH[:1], ["trunk", "head"]),
        (BOTH[1:], ["trunk", "value"]),
    ):
        seen.clear()
        engine.forward(mini_batch(), columns)
        assert seen == called
    seen.clear()
    engine.generate(prompts(), sampling())
    assert "value" not in seen and "head" in seen


@pytest.mark.parametrize("head", ["scalar", "both"])
def test_scores_are_the_values_after_the_last_token(head: Head) -> None:
    engine, batch = engine_of("critic", head=head), mini_batch(4)
    found = engine.forward(batch, [Column.of(name) for name in ("values", "token_scores", "scores")])
    inside = batch["response_mask"].bool()
    assert torch.equal(found["token_scores"], found["values"][:, 1:])
    assert found["token_scores"][inside].all() and not found["token_scores"][~inside].any()
    last = found["token_scores"].gather(1, inside.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.equal(found["scores"], last)


def test_an_empty_response_has_the_score_behind_its_prompt() -> None:
    engine, batch = trunk(), mini_batch()
    columns = {name: column.clone() for name, column in batch.columns.items()}
    columns["response_mask"][0] = 0
    columns["attention_mask"][0, LENGTHS.prompt :] = 0
    found = engine.forward(Batch(columns, batch.rows, 1), [Column.of("scores"), Column.of("values")])
    assert found["scores"][0] == found["values"][0, 0] != 0


def test_no_rows_have_columns_of_their_widths() -> None:
    columns = [*BOTH, Column.of("scores"), Column.of("token_scores")]
    found = trunk().forward(mini_batch().select(slice(0, 0)), columns)
    widths = [(0, LENGTHS.response), (0, LENGTHS.response + 1), (0,), (0, LENGTHS.response)]
    assert [tuple(column.shape) for column in found.values()] == widths


def test_responses_equal_the_policy_alone() -> None:
    engine = trunk()
    assert same(engine.generate(prompts(), sampling()), apart(engine)[0].generate(prompts(), sampling()))


# --- how it is trained


def test_the_gradient_is_the_sum_over_two_models() -> None:
    """Gradients are compared by one step of plain gradient descent."""
    engine = trunk(optimizer=PLAIN)
    before = snapshot(engine)
    policy, critic = apart(engine, optimizer=PLAIN)
    engine.train([(mini_batch(), shared(0.5))])
    policy.train([(mini_batch(), likelihood())])
    critic.train([(mini_batch(), squared_values())])
    after, of_policy, of_critic = engine.weights(), policy.weights(), critic.weights()
    for name, start in before.items():
        expected = torch.zeros_like(start)
        expected += of_policy[name] - start if name in of_policy else 0
        expected += 0.5 * (of_critic[name] - start) if name in of_critic else 0
        assert torch.allclose(after[name] - start, expected, rtol=1e-4, atol=1e-6), name
        assert expected.any(), name


def test_a_loss_without_values_leaves_their_head_alone() -> None:
    engine = trunk(optimizer=PLAIN)
    (policy, _), before = apart(engine, optimizer=PLAIN), snapshot(engine)
    for model in (engine, policy):
        train(model, 2)
    after = engine.weights()
    assert torch.equal(after["score.weight"], before["score.weight"])
    assert all(torch.allclose(after[name], weight, rtol=1e-6) for name, weight in policy.weights().items())


def test_a_loss_gets_values_only_with_values() -> None:
    seen: list[Tensor | None] = []

    def function(outputs: Outputs, batch: Batch, totals: Totals) -> tuple[Tensor, Moments]:
        seen.append(outputs.values)
        return outputs.quantity.sum(), {}

    engine = trunk(optimizer=PLAIN)
    for with_values in (True, False):
        engine.train([(mini_batch(), Loss("logprobs", function, (), with_values=with_values))])
    assert seen[0] is not None and seen[0].shape == (5, LENGTHS.response + 1)
    assert seen[1] is None
    with pytest.raises(AssertionError, match="both heads"):
        engine_of().train([(mini_batch(), Loss("logprobs", function, (), with_values=True))])


@pytest.mark.parametrize(
    "settings",
    [{"micro_batch_tokens": 1}, {"activation_checkpointing": True}, {"logits_mb": 1e-4}],
    ids=str,
)
def test_other_ways_to_compute_give_the_same_weights(settings: dict[str, Any]) -> None:
    plain, other = trunk(optimizer=FAST), trunk(optimizer=FAST, **settings)
    for engine in (plain, other):
        train(engine, 3, shared())
    for name, weight in plain.weights().items():
        assert torch.allclose(other.weights()[name], weight, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_train_close_to_32(dtype: str) -> None:
    full, half = trunk(optimizer=FAST), trunk(optimizer=FAST, dtype=dtype)
    norms = [[float(step["grad_norm"][1]) for step in train(engine, 3, shared())] for engine in (full, half)]
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    assert half.weights()["score.weight"].dtype == torch.float32


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_with_adapters_the_value_head_is_trained_too(targets: tuple[str, ...] | None) -> None:
    engine = trunk(optimizer=FAST, lora=LORA | {"targets": targets})
    before = snapshot(engine)
    train(engine, 2, shared())
    changed = {name for name, weight in engine.weights().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name or name == "score.weight"}
    settings = placed(lora=LORA | {"targets": targets}).settings
    planned = model_shape("actor", settings, "both")
    assert planned is not None and settings.lora is not None
    assert changed == {name for name, _ in planned.with_adapters("actor", settings.lora).trained}


def test_a_shadow_has_both_heads() -> None:
    engine, shadow = trunk(optimizer=FAST), trunk("ref")
    train(engine, 2, shared())
    shadow.load_weights(engine.weights())
    assert same(shadow.forward(mini_batch(), BOTH), engine.forward(mini_batch(), BOTH))


# --- several losses in one step


def test_one_step_on_two_losses_is_one_on_their_sum() -> None:
    first, second = mini_batch(1), mini_batch(2, rows=3)
    engine, other = (trunk(optimizer=PLAIN, micro_batch_tokens=12) for _ in range(2))
    before = snapshot(engine)
    engine.train([(first, shared()), (second, likelihood(0.3))])
    moved = {name: weight - before[name] for name, weight in engine.weights().items()}
    expected = dict.fromkeys(before, torch.zeros(()))
    for batch, loss in ((first, shared()), (second, likelihood(0.3))):
        other.load_weights(before)
        other.train([(batch, loss)])
        expected = {name: expected[name] + weight - before[name] for name, weight in other.weights().items()}
    assert all(torch.allclose(moved[name], expected[name], rtol=1e-4, atol=1e-6) for name in before)


def test_only_the_very_last_piece_is_the_last() -> None:
    engine = trunk(optimizer=PLAIN, micro_batch_tokens=1)
    seen: list[bool] = []
    parts = [(mini_batch(1), shared()), (mini_batch(2, rows=3), likelihood())]
    statistics = engine._passes.backward(parts, lambda _, is_last: seen.append(is_last))
    assert seen == [False] * 7 + [True]
    assert statistics["loss"][0] == 5


def test_a_rank_without_rows_reports_the_statistics_of_all_losses() -> None:
    empty = mini_batch().select(slice(0, 0))
    named = Loss("logprobs", likelihood().function, ("further",))
    statistics = trunk(optimizer=PLAIN).train([(empty, shared()), (empty, named)])
    assert statistics["loss"].tolist() == statistics["further"].tolist() == [0, 0, 0]


def test_rows_that_count_for_nothing_are_not_counted() -> None:
    batch = mini_batch()
    mask = batch["response_mask"].clone()
    mask[1:3] = 0
    counting = Batch({**batch.columns, "loss_mask": mask}, batch.rows, 1)
    assert torch.equal(counting.mask, mask) and batch.mask is batch["response_mask"]
    totals = Totals.of(counting, trunk()._passes.dp)
    assert (totals.tokens, totals.sequences, totals.prompts) == (int(mask.sum()), 3, 5)


# --- weights: initialised, saved, loaded


def test_the_trunk_is_initialised_as_without_the_second_head() -> None:
    model = load_model(placed(head="both"), SEED)
    weights, alone = dict(model.named_parameters()), dict(load_model(placed(), SEED).named_parameters())
    assert set(weights) - set(alone) == {"score.weight"}
    assert all(torch.equal(weights[name], weight) for name, weight in alone.items())
    again = dict(load_model(placed("ref", "both", lora=LORA), SEED).named_parameters())
    assert again["score.weight"].shape == (1, TINY["hidden_size"]) and not again["score.weight"].requires_grad
    assert torch.equal(weights["score.weight"], load_model(placed(head="both"), SEED).score.weight)


def test_the_second_head_is_initialised_as_wide_as_others() -> None:
    wide = {**TINY, "hidden_size": 4096, "intermediate_size": 8, "initializer_range": 0.05}
    settings = ModelSpec(init=wide)
    weight = load_model(replace(placed(head="both"), settings=settings), SEED).score.weight.detach()
    assert float(weight.std()) == pytest.approx(0.05, rel=0.05)
    assert float(weight.mean()) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", Families.LLAMA_LIKE)
def test_planned_shapes_equal_loaded_ones(family: str, tied: bool, tmp_path: Path) -> None:
    settings = ModelSpec(init=TINY | {"model_type": family, "tie_word_embeddings": tied})
    model = load_model(replace(placed(head="both"), settings=settings), SEED)
    found = tuple(sorted((name, tuple(weight.shape)) for name, weight in model.named_parameters()))
    planned = model_shape("actor", settings, "both")
    assert planned is not None and planned.parameters == found
    # and so of the files that are written
    ModelDirectory(tmp_path / "saved").save({name: w.detach() for name, w in model.named_parameters()}, model.config)
    for head in ("both", "causal"):
        assert model_shape("actor", ModelSpec(path=str(tmp_path / "saved")), head) == model_shape(
            "actor", settings, head
        )


def saved(engine: TorchEngine, directory: Path) -> str:
    weights = {name: weight.clone().contiguous() for name, weight in engine.weights().items()}
    ModelDirectory(directory / "model").save(weights, engine.config)
    return str(directory / "model")


def test_a_saved_model_comes_back_with_both_heads(tmp_path: Path) -> None:
    engine = trunk(optimizer=FAST)
    train(engine, 2, shared())
    path = saved(engine, tmp_path)
    assert same(trunk(path=path).weights(), engine.weights())
    assert same(trunk(path=path).forward(mini_batch(), BOTH), engine.forward(mini_batch(), BOTH))
    head = saved_value_head(path)
    assert head is not None and torch.equal(head, engine.weights()["score.weight"])


def test_transformers_reads_a_saved_model_as_a_policy_and_as_a_critic(tmp_path: Path) -> None:
    engine = trunk(optimizer=FAST)
    train(engine, 2, shared())
    path = saved(engine, tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    weights = engine.weights()
    for model in (policy, critic):
        assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())


def test_files_of_a_policy_alone_get_a_random_head(tmp_path: Path) -> None:
    path = saved(engine_of(), tmp_path)
    assert saved_value_head(path) is None
    assert trunk(path=path).weights()["score.weight"].any()


def test_peft_reads_the_adapters_of_a_saved_model_as_a_policy(tmp_path: Path) -> None:
    base = saved(engine_of(), tmp_path)
    engine = trunk(path=base, optimizer=FAST, lora=LORA)
    train(engine, 2, shared())
    weights = {n: w.clone().contiguous() for n, w in engine.weights().items() if ".lora_" in n or n == "score.weight"}
    ModelDirectory(tmp_path / "adapters").save_adapters(weights, ModelSpec(path=base, lora=LoraSpec(**LORA)), "both")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapters")).eval()
    batch = mini_batch()
    mask = batch["attention_mask"].long()
    text = {
        "input_ids": batch["tokens"].long(),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    with torch.no_grad():
        expected: HeadsOutput = engine._model(**text)
        assert torch.allclose(loaded(**text).logits, expected.logits, rtol=1e-5, atol=1e-6)


# --- shared by two ranks

OVER_RANKS = ("zero", "tp", "cp", "context_parallel", "engine")
"""Settings that change how ranks share the work."""


@pytest.fixture(scope="module")
def of_two_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, dict[str, Tensor]], ...]:
    """Return the results of each rank, by case."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    cases = [
        test.callspec.params["case"] for test in tests if test.originalname == "test_two_ranks_compute_the_same_as_one"
    ]
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks("both_heads_ranks", directory, *cases, number=2)
    return tuple(torch.load(directory / f"rank-{rank}.pt") for rank in range(2))


@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_two_ranks_compute_the_same_as_one(case: str, of_two_ranks: tuple[dict[str, dict[str, Tensor]], ...]) -> None:
    """Rows are shared unevenly, and of the second loss one rank has none."""
    settings = {name: value for name, value in CASES[case].items() if name not in OVER_RANKS}
    engine = trunk_of(INIT, **settings)
    before, losses = snapshot(engine), engine.losses(parts_of(0, None))
    for step in range(UPDATES):
        statistics = engine.train(parts_of(step, None))
        assert step or all(torch.equal(statistics[name], losses[name]) for name in losses.keys() - {"total_loss"})
    expected = engine.forward(prompts(), BOTH)
    responses = engine.generate(prompts(), sampling())
    first, second = (found[case] for found in of_two_ranks)
    tolerance = 0.1 if "dtype" in settings else 1e-4
    # without the sum of squares, which is none of parts of a sum
    both = first["losses"] if has_all_rows(case) else first["losses"] + second["losses"]
    assert torch.allclose(both[:, :2], torch.stack([*losses.values()])[:, :2], rtol=tolerance, atol=tolerance)
    for name, column in expected.items():
        found = first[name] if has_all_rows(case) else torch.cat([first[name], second[name]])
        assert torch.allclose(found, column, rtol=tolerance, atol=tolerance), name
    if "dtype" not in settings:
        tokens = [found["response tokens"] for found in (first, second)]
        assert torch.equal(tokens[0] if has_all_rows(case) else torch.cat(tokens), responses["tokens"])
    weights = engine.weights()
    found = {name.removeprefix("weight "): w for name, w in first.items() if name.startswith("weight ")}
    assert "score.weight" in found
    for name, weight in found.items():
        assert torch.equal(weight, second[f"weight {name}"]), name
        assert torch.allclose(weight.float(), weights[name], rtol=tolerance, atol=tolerance / 3), name
        assert not torch.equal(weights[name], before[name]), name
