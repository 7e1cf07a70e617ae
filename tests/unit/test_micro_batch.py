"""Micro-batches: within the budget, without columns of padding, samples of a prompt together."""

from __future__ import annotations

import random

import pytest
import torch

from flexrlhf.engines.base import Batch
from flexrlhf.engines.micro_batch import MicroBatch, idle_micro_batch, micro_batches
from flexrlhf.operators.columns import Lengths

LENGTHS = Lengths(prompt=4, response=6)


def batch_of(texts: list[tuple[int, int]], samples_per_prompt: int = 1) -> Batch:
    """Rows with so many prompt and response tokens; the token is 100 * row + column, also where the mask is 0."""
    columns = torch.arange(10)
    prompts, responses = (torch.tensor([text[i] for text in texts]).view(-1, 1) for i in range(2))
    mask = ((columns >= 4 - prompts) & (columns < 4 + responses)).to(torch.uint8)
    tokens = (torch.arange(len(texts))[:, None] * 100 + columns).int()
    return Batch({"tokens": tokens, "attention_mask": mask}, torch.arange(len(texts)), samples_per_prompt)


def split(texts: list[tuple[int, int]], budget: int, samples_per_prompt: int = 1) -> list[MicroBatch]:
    return list(micro_batches(batch_of(texts, samples_per_prompt), LENGTHS, budget))


def rows(pieces: list[MicroBatch]) -> list[list[int]]:
    return [piece.batch.rows.tolist() for piece in pieces]


def test_columns_that_are_padding_in_all_rows_are_left_out() -> None:
    (piece,) = split([(2, 3), (1, 1)], 1000)
    assert (piece.first, piece.last, piece.response_width) == (2, 7, 3)
    assert piece.tokens.tolist() == [[2, 3, 4, 5, 6], [102, 103, 104, 105, 106]]
    assert piece.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]


def test_positions_count_from_the_first_token_of_the_text() -> None:
    (piece,) = split([(3, 1), (1, 2)], 1000)
    assert piece.position_ids.tolist() == [[0, 1, 2, 3, 3], [0, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1000, [[0, 1, 2, 3]]),
        (20, [[0, 1, 2, 3]]),
        (19, [[0, 1, 2], [3]]),
        (10, [[0, 1], [2, 3]]),
        (1, [[0], [1], [2], [3]]),
    ],
)
def test_rows_are_taken_until_the_budget_is_full(budget: int, expected: list[list[int]]) -> None:
    """Each row is 2 + 3 tokens; one row alone may exceed the budget."""
    assert rows(split([(2, 3)] * 4, budget)) == expected


def test_a_long_row_widens_all_rows_of_its_micro_batch() -> None:
    assert rows(split([(1, 1), (1, 1), (4, 6), (1, 1)], 20)) == [[0, 1], [2, 3]]
    assert rows(split([(1, 1), (1, 1), (4, 6), (1, 1)], 19)) == [[0, 1], [2], [3]]


def test_a_micro_batch_is_as_wide_as_its_own_rows() -> None:
    pieces = split([(4, 6), (1, 1), (1, 1)], 10)
    assert [(piece.first, piece.last) for piece in pieces] == [(0, 10), (3, 5)]


def test_samples_of_a_prompt_stay_together() -> None:
    assert rows(split([(2, 3)] * 6, 1, samples_per_prompt=3)) == [[0, 1, 2], [3, 4, 5]]
    assert rows(split([(2, 3)] * 6, 29, samples_per_prompt=3)) == [[0, 1, 2], [3, 4, 5]]
    assert rows(split([(2, 3)] * 6, 30, samples_per_prompt=3)) == [[0, 1, 2, 3, 4, 5]]


def test_an_empty_batch_has_no_micro_batch() -> None:
    assert split([], 100) == []


@pytest.mark.parametrize("texts", [[(2, 0)], [(2, 0), (1, 0)], [(0, 0)], [(0, 3)]])
def test_the_last_prompt_place_and_one_response_place_are_always_kept(texts: list[tuple[int, int]]) -> None:
    (piece,) = split(texts, 100)
    assert piece.first <= 3
    assert piece.last >= 5
    assert piece.response_width >= 1


def test_random_batches_are_covered_within_the_budget() -> None:
    rng = random.Random(0)
    for _ in range(200):
        samples = rng.randint(1, 3)
        texts = [(rng.randint(1, 4), rng.randint(0, 6)) for _ in range(samples * rng.randint(1, 8))]
        budget = rng.randint(1, 80)
        pieces = split(texts, budget, samples)
        assert [row for piece in rows(pieces) for row in piece] == list(range(len(texts)))
        for piece in pieces:
            size = len(piece.batch)
            assert size % samples == 0
            assert size * (piece.last - piece.first) <= budget or size == samples
            kept = piece.batch["attention_mask"].clone()
            kept[:, piece.first : piece.last] = 0
            assert not kept.any(), "a token of the text is missing"


def test_an_idle_micro_batch_is_one_row_of_two_tokens() -> None:
    """The last place of the prompt and the first of the response, for a rank that must call without rows."""
    piece = idle_micro_batch(LENGTHS, torch.device("cpu"))
    assert piece.idle and not split([(2, 3)], 100)[0].idle
    assert (piece.first, piece.last, piece.response_width) == (3, 5, 1)
    assert piece.attention_mask.tolist() == [[1, 1]]
    assert piece.position_ids.tolist() == [[0, 1]]
    assert piece.tokens.shape == (1, 2)
