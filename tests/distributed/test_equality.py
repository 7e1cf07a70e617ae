"""Every placement and schedule gives the results of the single-process reference, and so of every other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEFAULT, Case, every_case
from comparison import RELATIVE, deviations
from covering import covering
from launcher import Launches, Outcome, params
from peft import PeftModel, get_peft_model_state_dict
from reference_models import distance
from reference_responses import read_examples, text_of
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from flexrlhf.plan.pipeline import make_plan
from flexrlhf.weights.stored_model import StoredModel

# the first test of a launch waits for all its runs
pytestmark = pytest.mark.timeout(1800)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize ``each_case`` by the default cases, and by others where they are selected: every process would make
    20,000 tests and deselect them."""
    if "each_case" in metafunc.fixturenames:
        selected = metafunc.config.option.markexpr
        others = [] if "not full" in selected else [case for case in every_case() if case not in DEFAULT]
        full = covering(others, DEFAULT)
        product = [] if "not product" in selected else [case for case in others if case not in full]
        cases = [*params(DEFAULT), *params(full, set(full)), *params(product, set(product), pytest.mark.product)]
        metafunc.parametrize("each_case", cases)


def chosen(*settings: str) -> list[object]:
    return params(case for case in DEFAULT if case.setting in settings)


def test_a_run_equals_the_reference(launches: Launches, each_case: Case) -> None:
    first = next((d for d in deviations(launches.outcome(each_case)) if not d.size <= d.limit), None)
    assert first is None, f"{each_case.name}: {first}"


def test_every_shape_of_the_long_matrix_can_be_planned(launches: Launches) -> None:
    """One that cannot ends the launch that has it, with all its runs."""
    for case in {(case.shape, case.ranks): case for case in every_case()}.values():
        make_plan(launches.assets.spec(case))


def test_entropy_is_never_negative(launches: Launches, each_case: Case) -> None:
    assert all(row.get("entropy", 0.0) >= 0 for row in launches.outcome(each_case).metrics), each_case.name


def test_samples_are_the_same_rows_under_every_placement(launches: Launches, each_case: Case) -> None:
    """Samples that are a third of the step apart, as in the columns, which the reference has."""
    outcome = launches.outcome(each_case)
    found = [sample for sample in outcome.samples if sample["rows"] == "training"]
    steps = len(outcome.metrics) if outcome.plan.graph.generated else 0
    assert found == [sample for step in range(steps) for sample in expected_samples(outcome, step)]


def expected_samples(outcome: Outcome, step: int) -> list[dict[str, object]]:
    columns, tokenizer = outcome.columns(step), AutoTokenizer.from_pretrained(outcome.plan.spec.data.tokenizer)
    shape, width, k = outcome.plan.batch, outcome.plan.spec.data.max_prompt_tokens, outcome.plan.batch.sequences
    # rows of first sequences
    shape = replace(shape, samples_per_prompt=shape.samples_per_prompt // k, sequences=1)
    samples, count = [], shape.num_taken
    taken = (0, count // 3, 2 * count // 3)
    if shape.segments > 1 and shape.attempts > 1:
        # every so many places, as a step that replaces no group takes them
        number = shape.samples_per_prompt
        taken = tuple(row // number * number * shape.attempts + row % number for row in taken)
    rows = [shape.place_of(each, row) for row in taken for each in range(shape.segments)]
    if shape.segments > 1:
        rows = sorted(row for row in rows if columns["present"][row])
    for row in rows:
        tokens, mask = columns["tokens"][row], columns["response_mask"][row].bool()
        prompt = tokens[:width][columns["attention_mask"][row, :width].bool()]
        if not len(prompt):
            continue  # a place without a row
        samples.append(
            {
                **{"rows": "training", "step": step, "row": k * row},
                "weights_version": int(columns["policy_version"][row].max()),
                "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
                "response": text_of(tokenizer, tokens[width:][mask].tolist()),
                **(turns_of(columns, row, tokenizer, width) if "episode" in columns else {}),
                "length": int(mask.sum()),
                "finished": bool(columns["finished"][row]),
                **{
                    field: float(f"{columns[name][row].item():.6g}") if columns[name][row].isfinite() else None
                    for field, name in (("score", "scores"), ("cost", "scores.cost"))
                    if name in columns
                },
            }
        )
    return samples


def turns_of(columns: dict[str, torch.Tensor], row: int, tokenizer: Any, width: int) -> dict[str, object]:
    """Tokens in a row that were sampled up to the end of a turn, or were not, with the rewards on them; and the number
    of each turn and of the reply to it."""
    turns: list[tuple[bool, list[int], list[float]]] = []
    count, has_ended = int(columns["attention_mask"][row, width:].sum()), False
    for token, is_sampled, reward, ends in zip(
        *(columns["tokens"][row, width:][:count].tolist(), columns["response_mask"][row][:count].tolist()),
        *(columns[name][row][:count].tolist() for name in ("token_scores.environment", "turn_ends")),
        strict=True,
    ):
        if not turns or turns[-1][0] != is_sampled or has_ended:
            turns.append((is_sampled, [], []))
        turns[-1][1].append(token)
        turns[-1][2].append(reward)
        has_ended = bool(ends)
    numbers = list[list[int]]()
    for is_sampled, tokens, _ in turns:
        numbers += [[len(tokens), 0]] if is_sampled else []
        numbers[-1][1] = 0 if is_sampled else len(tokens)
    texts = [
        {
            "role": "policy" if is_sampled else "environment",
            "text": text_of(tokenizer, tokens) if is_sampled else tokenizer.decode(tokens, skip_special_tokens=True),
            **({"reward": sum(rewards) if math.isfinite(sum(rewards)) else None} if is_sampled else {}),
        }
        for is_sampled, tokens, rewards in turns
    ]
    return {"turns": texts, "turn_tokens": numbers}


@pytest.mark.parametrize("case", chosen("one"))
def test_the_ratio_is_one_at_the_first_update(launches: Launches, case: Case) -> None:
    """At temperature 0.7, with the whole step as one mini-batch: old and new log-probs are of the same distribution."""
    for row in launches.outcome(case).metrics:
        assert abs(row["update_kl"]) < 1e-6 and row["ratio_clipped"] == 0, (case.name, row)


@pytest.mark.parametrize("case", chosen("grpo-alone", "one-trunk-alone", "corrected-alone"))
def test_the_ratio_of_the_only_pass_is_one_to_the_last_bit(launches: Launches, case: Case) -> None:
    """It is taken to the log-probs of that pass, with the gradient of these: the equality above is of the weights."""
    assert "logprobs" not in launches.outcome(case).plan.graph.producers
    for row in launches.outcome(case).metrics:
        assert row["update_kl"] == row["ratio_clipped"] == 0, (case.name, row)


@pytest.mark.parametrize("case", params([Case("episodes-replayed", "co-located", 2)]))
def test_recorded_episodes_are_trained_on_without_their_environment(launches: Launches, case: Case) -> None:
    played, replayed = launches.outcome(Case("episodes", "co-located", 2)), launches.outcome(case)
    for step in range(len(played.metrics)):
        expected, found = played.columns(step), replayed.columns(step)
        for name in ("tokens", "response_mask", "episode", "token_scores.environment", "loss_mask"):
            assert torch.equal(expected[name].nan_to_num(9), found[name].nan_to_num(9)), (name, step)
    for role in ("actor", "critic"):
        assert distance(replayed.weights(role), played.weights(role)) < RELATIVE, role
    for row in played.metrics:
        times = [row[f"reply_seconds_{name}"] for name in ("p50", "p90", "p99", "max")]
        assert times == sorted(times) and times[0] > 0 and row["reply_seconds_mean"] < times[-1] < 10
    assert not any("reply_seconds_mean" in row for row in replayed.metrics)


def test_leaving_out_a_forward_changes_no_number(launches: Launches) -> None:
    """Directly, run by run: a forward without gradients and a training pass compute the same log-probs."""
    full, short = (launches.outcome(Case(name, "six", 2)) for name in ("grpo-recomputed", "grpo-alone"))
    assert "logprobs" in full.plan.graph.producers and "logprobs" not in short.plan.graph.producers
    assert distance(short.weights("actor"), full.weights("actor")) < 1e-6
    for one, other in zip(short.metrics, full.metrics, strict=True):
        assert one.keys() == other.keys()
        assert {name: one[name] for name in ("kl", "kl_token", "policy_loss", "actor_grad_norm")} == {
            name: pytest.approx(other[name], rel=1e-5, abs=1e-7)
            for name in ("kl", "kl_token", "policy_loss", "actor_grad_norm")
        }


@pytest.mark.parametrize("case", chosen("still"))
def test_nothing_changes_at_learning_rate_zero(launches: Launches, case: Case) -> None:
    """Three steps with syncs; that log-probs come from the first weights is part of the equality above."""
    for role in ("actor", "critic"):
        outcome = launches.outcome(case)
        first, last = load_file(f"{outcome.plan.model(role).path}/model.safetensors"), outcome.weights(role)
        assert last.keys() == first.keys() and all(torch.equal(last[name], first[name]) for name in first), role


@pytest.mark.parametrize(
    "case", chosen("adapters", "shared", "sft-adapters", "reward-adapters", "grpo-shared", "dpo-shared")
)
def test_peft_reads_the_adapters_that_a_run_wrote(launches: Launches, case: Case) -> None:
    """All adapters, and their scale: their effect follows from the equality above."""
    outcome = launches.outcome(case)
    for role in outcome.plan.graph.trained:
        lora = outcome.plan.model(role).lora
        if lora is not None:
            model = load_adapters(str(StoredModel.of(role, outcome.plan.model(role)).whole.path), outcome, role)
            read, written = get_peft_model_state_dict(model), outcome.weights(role)
            assert read.keys() == written.keys() and all(torch.equal(read[name], written[name]) for name in read), role
            config = model.peft_config["default"]
            assert (config.r, config.lora_alpha) == (lora.rank, lora.alpha), (case.name, role)


@pytest.mark.parametrize("case", chosen("reward", "reward-ends", "reward-bare"))
@torch.no_grad()
def test_transformers_gives_the_scores_of_a_saved_reward_model(launches: Launches, case: Case) -> None:
    """The evaluation rows after the last step, in one batch padded on the right with the padding token of the model."""
    outcome = launches.outcome(case)
    spec, saved = outcome.plan.spec, outcome.directory / "reward"
    model = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32).eval()
    assert spec.eval is not None
    rows = read_examples(spec, AutoTokenizer.from_pretrained(saved), spec.eval.path)
    sequences = [torch.tensor([*row.prompt, *response]) for row in rows for response in row.responses]
    ids = pad_sequence(sequences, batch_first=True, padding_value=model.config.pad_token_id)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    scores = outcome.evaluated("scores", spec.steps - 1)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[:, 0], scores, rtol=0, atol=1e-5)


def load_adapters(base: str, outcome: Outcome, role: str) -> PeftModel:
    """The model of ``role`` as a user loads it."""
    kind = AutoModelForCausalLM if role == "actor" else AutoModelForSequenceClassification
    return PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), str(outcome.directory / role))
