"""Scores of responses in evaluations, and pass@k against its definition."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from replicas import Alone, batch_of

from flexrlhf.config.data_settings import EvalSpec
from flexrlhf.engines.base import Batch, add_moments
from flexrlhf.metrics import METRICS
from flexrlhf.objectives.context import CombineContext
from flexrlhf.objectives.evaluation_metrics import evaluation_scores, pass_at_k

NAN = float("nan")


@pytest.mark.parametrize(("samples", "right"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 2), (6, 5), (6, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(samples: int, right: int) -> None:
    """All ways to choice k of the responses, of which the first so many are right."""
    for k in range(1, samples + 1):
        choices = list(combinations(range(samples), k))
        share = sum(any(response < right for response in choice) for choice in choices) / len(choices)
        assert float(pass_at_k(k, torch.tensor([right]), samples)[0]) == pytest.approx(share, abs=1e-12)


def metrics_of(
    settings: EvalSpec, scores: list[float], samples: int, finished: list[int] | None = None
) -> dict[str, float]:
    done = finished or [1] * len(scores)
    batch = batch_of(scores=torch.tensor(scores), finished=torch.tensor(done, dtype=torch.uint8))
    batch = Batch(batch.columns, batch.rows, samples)
    statistics = evaluation_scores(settings, batch, CombineContext([], Alone()))[1]
    return METRICS.evaluate({name: tuple(value.tolist()) for name, value in statistics.items()})


def test_scores_by_hand() -> None:
    """Two prompts of three responses: two right, one no number; none right."""
    found = metrics_of(
        EvalSpec(path="rows", pass_score=0.5, pass_at=2), [0.5, 1.5, NAN, 0.0, 0.25, -1.0], 3, [1, 1, 1, 0, 1, 1]
    )
    assert found == pytest.approx(
        {
            "eval_reward_mean": (0.5 + 1.5 + 0.0 + 0.25 - 1.0) / 5,
            "eval_reward_std": torch.tensor([0.5, 1.5, 0.0, 0.25, -1.0]).double().std(correction=0).item(),
            "eval_pass_at_1": (2 / 3 + 0) / 2,
            "eval_pass_at_k": (1 + 0) / 2,
            "eval_truncated": 1 / 6,
            "eval_score_invalid": 1 / 6,
        }
    )


def test_without_k_all_samples_count() -> None:
    assert metrics_of(EvalSpec(path="rows"), [0.0, 1.0, 0.0, 0.0], 2)["eval_pass_at_k"] == 0.5


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_score_that_is_no_number_is_wrong_and_left_out_of_the_mean(bad: float) -> None:
    found = metrics_of(EvalSpec(path="rows"), [bad, 2.0], 1)
    assert (found["eval_reward_mean"], found["eval_pass_at_1"], found["eval_score_invalid"]) == (2.0, 0.5, 0.5)
    assert "eval_reward_mean" not in metrics_of(EvalSpec(path="rows"), [bad], 1)


def test_statistics_of_ranks_add_up() -> None:
    settings, scores = EvalSpec(path="rows", pass_at=2), torch.tensor([0.0, 1.0, 2.0, NAN, 0.5, 0.0])
    batch = batch_of(scores=scores, finished=torch.ones(6, dtype=torch.uint8))
    batch = Batch(batch.columns, batch.rows, 2)
    whole = evaluation_scores(settings, batch, CombineContext([], Alone()))[1]
    parts = [
        evaluation_scores(settings, batch.select(part), CombineContext([], Alone()))[1]
        for part in (slice(0, 4), slice(4, 6))
    ]
    empty = evaluation_scores(settings, batch.select(slice(0, 0)), CombineContext([], Alone()))[1]
    assert empty.keys() == whole.keys()
    total = dict(empty)
    for part in parts:
        add_moments(total, part)
    assert all(torch.allclose(total[name], whole[name]) for name in whole)
