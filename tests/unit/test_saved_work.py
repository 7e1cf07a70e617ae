"""`python -m benchmarks.saved_work`: FLOPs are those counted by hand, and padded rows are laid out as said."""

from __future__ import annotations

import pytest

from benchmarks.peers.speed.workloads import SMALL
from benchmarks.saved_work.costs import compare, count_flops
from benchmarks.saved_work.passes import engine_with, forward_pass, optimizer_step
from benchmarks.saved_work.texts import LONGEST, Text, batch_of, padded, sampled_texts
from flexrlhf.engines.base import Batch
from flexrlhf.operators.columns import Lengths

LENGTHS = Lengths(12, 6)
"""Most tokens of the texts here."""
LAYERS, HIDDEN, FFN = (SMALL[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))


def forward_flops(batch: Batch, **settings: bool | str) -> float:
    return count_flops(forward_pass(engine_with(LENGTHS, **settings), [batch]))


def expected(tokens: int, pairs: int, responses: int) -> int:
    """Two operations for each weight and token: of layers, of scores and values of all pairs, of the language head."""
    layers = 2 * tokens * LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    attention = 2 * LAYERS * (2 * pairs * HIDDEN)
    return layers + attention + 2 * responses * HIDDEN * SMALL["vocab_size"]


def test_flops_of_a_forward_pass_are_those_counted_by_hand() -> None:
    batch = batch_of([Text(5, 3), Text(5, 3)], LENGTHS, SMALL["vocab_size"], samples=2)
    assert forward_flops(batch, share_prompts=False) == expected(tokens=2 * 8, pairs=2 * 8 * 8, responses=6)
    # the prompt and both responses to themselves, these to the prompt
    assert forward_flops(batch) == expected(tokens=11, pairs=5 * 5 + 2 * 3 * 3 + 6 * 5, responses=6)
    assert forward_flops(batch, attention="sdpa") == expected(tokens=11, pairs=11 * 11, responses=6)


def test_flops_of_backward_are_counted() -> None:
    """Of a product two further ones, of attention five, which computes its scores again."""
    batch = batch_of([Text(5, 3)], LENGTHS, SMALL["vocab_size"])
    engine = engine_with(LENGTHS)
    forward = expected(tokens=8, pairs=8 * 8, responses=3)
    attention = 2 * LAYERS * (8 * 8 * HIDDEN)
    assert count_flops(optimizer_step(engine, [batch])) == 3 * forward + attention


def test_padded_rows_are_as_wide_as_those_of_their_pass() -> None:
    texts = [Text(3, 1), Text(1, 2), Text(2, 2)]
    batch = batch_of(texts, LENGTHS, 32)
    passes = padded(batch, texts, LENGTHS, budget=10)
    assert [each["attention_mask"].sum(1).tolist() for each in passes] == [[5, 5], [4]]
    assert [each["response_mask"].sum(1).tolist() for each in passes] == [[2, 2], [2]]
    assert [len(each) for each in padded(batch, texts, LENGTHS, budget=15)] == [3]


def test_sampled_texts_have_the_lengths_that_the_help_names() -> None:
    texts = sampled_texts(4000)
    prompts, responses = ([getattr(text, name) for text in texts] for name in ("prompt", "response"))
    assert sum(prompts) / len(texts) == pytest.approx(129, rel=0.03)
    assert sum(responses) / len(texts) == pytest.approx(40, rel=0.03)
    assert (max(prompts), max(responses)) == (LONGEST.prompt, LONGEST.response) and min(prompts) == 1


def test_both_ways_run_in_turns_behind_a_run_that_warms_up() -> None:
    calls: list[str] = []
    found = compare("what", "work", lambda: calls.append("with"), lambda: calls.append("without"), rounds=2)
    assert calls == ["with", "without"] * 3
    assert found.computed.flops == found.left_out.flops == 0
