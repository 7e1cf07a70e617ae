"""Metrics of evaluations by hand, and over all data-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from replicas import Alone, Port, batch_of, mask_of, on_replicas
from torch import Tensor

from flexrlhf.engines.base import Moments, add_moments
from flexrlhf.objectives.context import CombineContext
from flexrlhf.objectives.evaluation_metrics import diversity, likelihood, pair_accuracy


def tokens_of(*rows: list[int], prompt: int = 1) -> Tensor:
    return torch.tensor([[7] * prompt + row for row in rows], dtype=torch.int32)


RESPONSES = tokens_of([1, 2, 1, 2], [1, 2, 3, 0], [5, 0, 0, 0], prompt=2)
RESPONSE_MASK = mask_of("1111", "1110", "1000")


def test_distinct_2_by_hand() -> None:
    """12 21 12, 12 23: five bigrams, of which 12, 21 and 23 differ; the prompt and the padding give none."""
    batch = batch_of(tokens=RESPONSES, response_mask=RESPONSE_MASK)
    _, statistics = diversity(None, batch, CombineContext([], Alone()))
    assert float(statistics["eval_distinct_2"][1] / statistics["eval_distinct_2"][0]) == pytest.approx(3 / 5)
    assert statistics["eval_response_length"].tolist()[:2] == [3.0, 8.0]


def test_distinct_2_counts_over_all_ranks() -> None:
    parts = [slice(0, 1), slice(1, 3), slice(3, 3)]
    batch = batch_of(tokens=RESPONSES, response_mask=RESPONSE_MASK)

    def work(rank: int, port: Port) -> Moments:
        return diversity(None, batch.select(parts[rank]), CombineContext([], port))[1]

    total: Moments = {}
    for statistics in on_replicas(3, work):
        add_moments(total, statistics)
    assert float(total["eval_distinct_2"][1] / total["eval_distinct_2"][0]) == pytest.approx(3 / 5)


def test_distinct_2_without_a_bigram_is_zero() -> None:
    batch = batch_of(tokens=tokens_of([5, 0]), response_mask=mask_of("10"))
    _, statistics = diversity(None, batch, CombineContext([], Alone()))
    assert float(statistics["eval_distinct_2"][1]) == 0.0


def test_accuracy_and_likelihood_by_hand() -> None:
    _, statistics = pair_accuracy(
        None, batch_of(2, scores=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])), CombineContext([], Alone())
    )
    assert statistics["eval_accuracy"].tolist()[:2] == [3.0, 1.0]
    batch = batch_of(logprobs=torch.tensor([[-1.0, -9.0], [-2.0, -3.0]]), response_mask=mask_of("10", "11"))
    _, statistics = likelihood(None, batch, CombineContext([], Alone()))
    assert statistics["eval_nll"].tolist()[:2] == [3.0, 6.0]
