"""Warnings of metrics: what is large or jumps is reported, once in a while, and a healthy run never is."""

from __future__ import annotations

import math
import random

import pytest

from flexrlhf.metrics import METRICS
from flexrlhf.trainer.step_warnings import LEAST, RareWarnings, StepWarnings

Rows = list[dict[str, float]]


def lines_of(rows: Rows, capsys: pytest.CaptureFixture[str], num_rows: int = 16) -> list[str]:
    warnings = StepWarnings("run", num_rows)
    for step, row in enumerate(rows):
        warnings.observe(step, row)
    return capsys.readouterr().err.splitlines()


def healthy(steps: int = 300) -> Rows:
    """Noise as wide as a factor of 4 in either direction, around numbers that fall to a tenth."""
    rng = random.Random(3)

    def around(value: float, step: int) -> float:
        return value * 0.1 ** (step / steps) * 4 ** rng.uniform(-1, 1)

    return [
        {
            **{"kl_token": rng.uniform(-0.1, 0.4), "update_kl": rng.uniform(0, 0.05)},
            **{"policy_loss": rng.gauss(0, 0.003), "value_loss": around(3, step), "actor_grad_norm": around(5, step)},
            **{"pair_loss": around(0.7, step), "group_alike": rng.uniform(0, 0.9)},
            **{"reward_mean": rng.gauss(0, 1), "reward_std": around(1, step), "truncated": rng.uniform(0, 0.4)},
        }
        for step in range(steps)
    ]


def test_a_healthy_run_has_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(healthy(), capsys) == []


@pytest.mark.parametrize("metric", ["value_loss", "actor_grad_norm", "pair_loss"])
def test_a_jump_is_reported_where_it_is(metric: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = healthy()
    rows[200][metric] = 30 * max(row[metric] for row in rows)
    (line,) = lines_of(rows, capsys)
    assert line.startswith(f"flexrlhf: run: step 200: {metric} ") and "is over 20 times its median" in line


@pytest.mark.parametrize(
    ("metric", "value", "limit"),
    [("kl_token", 2.5, 2), ("kl_token", -2.5, 2), ("kl_token", math.nan, 2), ("update_kl", 0.6, 0.5)],
)
def test_a_kl_that_explodes_is_reported_once_in_a_while(
    metric: str, value: float, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = healthy(100)
    for row in rows[30:]:
        row[metric] = value
    lines = lines_of(rows, capsys)
    assert len(lines) == math.ceil(70 / RareWarnings.INTERVAL_STEPS)
    assert lines[0].startswith(f"flexrlhf: run: step 30: {metric} ") and lines[0].endswith(f"is beyond {limit}")


def test_a_first_gradient_after_many_of_zero_is_no_jump(capsys: pytest.CaptureFixture[str]) -> None:
    rows: Rows = [{"actor_grad_norm": 0.0, "value_loss": 0.0} for _ in range(30)]
    assert lines_of([*rows, {"actor_grad_norm": 5.0, "value_loss": 5.0}], capsys) == []


def test_small_losses_in_nats_may_jump(capsys: pytest.CaptureFixture[str]) -> None:
    """A pair loss of 0.001 for long, and then one pair that is wrong."""
    rows: Rows = [{"pair_loss": 0.001, "value_loss": 0.001} for _ in range(LEAST)]
    assert lines_of([*rows, {"pair_loss": 0.9, "value_loss": 0.001}], capsys) == []
    assert len(lines_of([*rows, {"pair_loss": 1.1, "value_loss": 0.9}], capsys)) == 2
    assert lines_of([*rows[1:], {"pair_loss": 1.1, "value_loss": 0.9}], capsys) == [], "too few steps before"


def scored(*scores: float, steps: int = 1, **further: float) -> Rows:
    """Rows of metrics of steps with these scores, computed as a run computes them."""
    total = (float(len(scores)), math.fsum(scores), math.fsum(score * score for score in scores))
    return [{**METRICS.evaluate({"reward": total}), **further} for _ in range(steps)]


@pytest.mark.parametrize("score", [0.0, -0.1, 1 / 3, 1e6])
def test_equal_scores_are_reported_with_their_steps_in_a_row(score: float, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*scored(score, 1.5), *scored(*[score] * 7, steps=30), *scored(score, 1.5), *scored(score, score)]
    first, second = lines_of(rows, capsys)
    words = f"all responses have the same score {score:.4g}, so that none is better than another"
    assert first == f"flexrlhf: run: step 1: {words}; samples.jsonl shows some of them"
    assert second == f"flexrlhf: run: step 21: {words}, for 21 steps in a row; samples.jsonl shows some of them"


def test_one_response_has_nothing_to_differ_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(scored(0.5, steps=3), capsys, num_rows=1) == []


def test_groups_without_a_difference_have_no_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = lines_of(scored(0.0, 0.0, 1.0, 1.0, group_alike=1.0), capsys)
    assert "step 0: in every group all responses have the same score, so that no gradient follows" in line
    (line,) = lines_of(scored(0.0, 0.0, group_alike=1.0), capsys)
    assert "all responses have the same score 0, so that no gradient follows" in line
    assert lines_of(scored(0.0, 0.0, 1.0, 1.0, group_alike=0.99), capsys) == []


@pytest.mark.parametrize(("share", "words"), [(1.0, "all responses are"), (0.51, "51% of the responses are")])
def test_truncated_responses_are_reported(share: float, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows: Rows = [{"truncated": 0.5}, {"truncated": share}]
    (line,) = lines_of(rows, capsys)
    assert line == (
        f"flexrlhf: run: step 1: {words} truncated at data.max_response_tokens; samples.jsonl shows some of them"
    )
