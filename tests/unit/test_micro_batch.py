"""Micro-batches: tokens, positions, attention and the places of outputs, of packed rows and of rows with one text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexrlhf.engines.base import Batch
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.memory.packed_rows import PackedPass
from flexrlhf.operators.columns import Lengths

LENGTHS = Lengths(prompt=4, response=6)
APART = PassSettings(LENGTHS, 1000)
PACKED = replace(APART, packs=True)
SHARED = replace(PACKED, shares=True)
WIDE = replace(SHARED, multiple=8)
WITHOUT_MASK = replace(SHARED, masks=False)


def batch_of(texts: list[tuple[int, int]], samples_per_prompt: int = 1, same_prompts: bool = False) -> Batch:
    """Rows with so many prompt and response tokens; the token is 100 * row + column, also where the mask is 0.

    ``same_prompts``: tokens of prompts are 100 * prompt + column.
    """
    columns, rows = torch.arange(10), torch.arange(len(texts))
    prompts, responses = (torch.tensor([text[i] for text in texts]).view(-1, 1) for i in range(2))
    mask = ((columns >= 4 - prompts) & (columns < 4 + responses)).to(torch.uint8)
    tokens = (rows[:, None] * 100 + columns).int()
    if same_prompts:
        tokens[:, :4] = (rows[:, None] // samples_per_prompt * 100 + columns[:4]).int()
    return Batch({"tokens": tokens, "attention_mask": mask}, rows, samples_per_prompt)


def split(
    texts: list[tuple[int, int]], settings: PassSettings = APART, samples: int = 1, compares: bool = False
) -> list[MicroBatch]:
    return list(MicroBatch.split(replace(batch_of(texts, samples, same_prompts=True), compares=compares), settings))


def texts_of(piece: MicroBatch) -> list[list[int]]:
    """Tokens of each text, by the places at which outputs are read."""
    return [tokens[mask].tolist() for tokens, mask in zip(piece.text_tokens, piece.text_mask, strict=True)]


def seen(piece: MicroBatch) -> Tensor:
    """Tokens (m, W, W) that each token attends to."""
    m, width = piece.tokens.shape
    causal = torch.ones(width, width, dtype=torch.bool).tril().expand(m, width, width)
    mask = piece.attention_mask
    if piece.attended is not None:
        assert mask is None
        flat = torch.zeros(m * width, m * width, dtype=torch.bool)
        for part in piece.attended.parts:
            for (query, queries), (key, keys) in zip(part.queries, part.keys, strict=True):
                block = torch.ones(queries, keys, dtype=torch.bool)
                flat[query : query + queries, key : key + keys] |= block.tril() if part.causal else block
        assert piece.attended.pairs == flat.sum()
        return torch.stack([flat[row * width :, row * width :][:width, :width] for row in range(m)])
    if mask is None:
        return causal
    return causal & mask.bool()[:, None] if mask.dim() == 2 else mask[:, 0] == 0


def contexts(piece: MicroBatch) -> list[list[list[int]]]:
    """Tokens that each token of each text attends to, itself included, in the order of their positions."""
    mask, tokens = seen(piece), piece.tokens
    found = []
    for places, inside in zip(piece.places, piece.text_mask, strict=True):
        of_text = []
        for place in places[inside].tolist():
            row, column = divmod(place, piece.width)
            order = piece.position_ids[row][mask[row, column]].argsort()
            of_text.append(tokens[row][mask[row, column]][order].tolist())
        found.append(of_text)
    return found


def test_prompt_and_response_adjoin() -> None:
    """Rows sorted by length, the longest first in the pass; the batch keeps its order."""
    (piece,) = split([(1, 1), (2, 3)])
    assert piece.tokens.tolist() == [[102, 103, 104, 105, 106], [3, 4, 0, 0, 0]]
    assert piece.attention_mask is not None
    assert piece.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert piece.order.tolist() == [0, 1]
    assert texts_of(piece) == [[3, 4], [102, 103, 104, 105, 106]]


def test_packed_rows_by_hand() -> None:
    (piece,) = split([(1, 1), (2, 3), (1, 2)], PACKED)
    assert piece.tokens.tolist() == [[102, 103, 104, 105, 106], [203, 204, 205, 3, 4]]
    assert piece.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]
    assert seen(piece)[1].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert piece.state_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert piece.state_places[piece.state_mask].tolist() == [8, 9, 1, 2, 3, 4, 5, 6, 7]
    assert piece.scored_tokens.tolist() == [4, 104, 105, 106, 204, 205]


def test_samples_share_their_prompt_by_hand() -> None:
    (piece,) = split([(2, 1), (2, 2)], SHARED, samples=2)
    assert piece.tokens.tolist() == [[2, 3, 4, 104, 105]]
    assert piece.position_ids.tolist() == [[0, 1, 2, 2, 3]]
    assert seen(piece)[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert piece.state_places[0, :2].tolist() == [1, 2]
    assert piece.state_places[1].tolist() == [1, 3, 4]


def test_one_text_in_each_row_needs_no_mask() -> None:
    (piece,) = split([(2, 3), (2, 3)], PACKED)
    assert piece.attention_mask is None and piece.tokens.shape == (2, 5)


def test_other_prompts_are_not_shared() -> None:
    """Whole texts of another tokenizer end at the prompt's last place, and differ within a unit."""
    (piece,) = MicroBatch.split(batch_of([(3, 1), (3, 1)], 2), SHARED)
    assert texts_of(piece) == [[1, 2, 3, 4], [101, 102, 103, 104]]
    (piece,) = MicroBatch.split(batch_of([(3, 1), (2, 1)], 2, same_prompts=True), SHARED)
    assert texts_of(piece) == [[1, 2, 3, 4], [2, 3, 104]]


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize(
    "settings",
    [APART, PACKED, SHARED, WIDE, WITHOUT_MASK],
    ids=["apart", "packed", "shared", "wide", "without a mask"],
)
def test_random_texts_see_themselves_alone(settings: PassSettings, compares: bool) -> None:
    rng = random.Random(0)
    for _ in range(60):
        samples = rng.randint(1, 3)
        prompts = [rng.randint(1, 4) for _ in range(rng.randint(1, 8))]
        texts = [(prompt, rng.randint(0, 6)) for prompt in prompts for _ in range(samples)]
        batch = batch_of(texts, samples, same_prompts=True)
        budget, longest = rng.randint(1, 80), max(map(sum, texts))
        pieces = list(MicroBatch.split(replace(batch, compares=compares), replace(settings, budget=budget)))
        assert sorted(row for piece in pieces for row in piece.order.tolist()) == list(range(len(texts)))
        for piece in pieces:
            assert piece.batch.rows.tolist() == piece.order.tolist() == sorted(piece.order.tolist())
            assert len(piece.batch) % samples == 0 or not compares
            wider = len(piece.tokens) * (settings.multiple - 1)
            assert piece.tokens.numel() <= max(budget, longest) + wider or compares
            assert piece.width % settings.multiple == 0
            expected = [batch["tokens"][row][batch["attention_mask"][row].bool()].tolist() for row in piece.order]
            assert texts_of(piece) == expected
            assert contexts(piece) == [[text[: end + 1] for end in range(len(text))] for text in expected]
            counts = [texts[row][1] for row in piece.order.tolist()]
            assert piece.state_mask[:, 1:].sum(1).tolist() == counts
            assert piece.state_mask.sum(1).tolist() == [count + 1 for count in counts]


def test_samples_that_a_loss_compares_stay_together() -> None:
    for budget, expected in ((1, [[0, 1, 2], [3, 4, 5]]), (29, [[0, 1, 2], [3, 4, 5]]), (30, [[0, 1, 2, 3, 4, 5]])):
        pieces = split([(2, 3)] * 6, replace(APART, budget=budget), samples=3, compares=True)
        assert [piece.order.tolist() for piece in pieces] == expected


@pytest.mark.parametrize("settings", [APART, PACKED, SHARED], ids=["apart", "packed", "shared"])
def test_samples_of_a_prompt_are_divided(settings: PassSettings) -> None:
    """A pass has one text at least; with room for a shared prompt, more texts than without."""
    for budget, expected in ((1, [[0], [1], [2]]), (10, [[0, 1], [2]]), (15, [[0, 1, 2]])):
        pieces = split([(2, 3)] * 3, replace(settings, budget=budget), samples=3)
        assert [piece.order.tolist() for piece in pieces] == expected
    (piece,) = split([(2, 3)] * 3, replace(SHARED, budget=11), samples=3)
    assert piece.tokens.shape == (1, 11)


def test_an_empty_batch_has_no_micro_batch() -> None:
    assert list(MicroBatch.split(batch_of([(1, 1)]).select(slice(0, 0)), APART)) == []


@pytest.mark.parametrize("settings", [APART, PACKED, SHARED], ids=["apart", "packed", "shared"])
@pytest.mark.parametrize("texts", [[(2, 0)], [(2, 0), (1, 0)], [(0, 0)], [(0, 3)], [(0, 0), (2, 2)]])
def test_texts_without_prompt_or_response_have_places(texts: list[tuple[int, int]], settings: PassSettings) -> None:
    (piece,) = split(texts, settings)
    assert piece.state_places.shape == piece.state_mask.shape == (len(texts), max(r for _, r in texts) + 1)
    assert piece.state_mask[:, 1:].sum(1).tolist() == [response for _, response in texts]
    assert (piece.text_lengths > 0).all()
    assert int(piece.state_places.max()) < piece.tokens.numel()


def test_the_same_text_is_computed_once() -> None:
    """So that equal samples of a group have equal scores, to the last bit."""
    batch = batch_of([(2, 1), (2, 2), (2, 1)], 3, same_prompts=True)
    batch["tokens"][2] = batch["tokens"][0]
    (piece,) = MicroBatch.split(batch, SHARED)
    assert piece.tokens.tolist() == [[2, 3, 4, 104, 105]]
    assert torch.equal(piece.places[0], piece.places[2]) and piece.order.tolist() == [0, 1, 2]
    (piece,) = MicroBatch.split(batch, PACKED)
    assert piece.tokens.numel() == 8 and texts_of(piece) == [[2, 3, 4], [2, 3, 104, 105], [2, 3, 4]]
    (piece,) = MicroBatch.split(batch, APART)
    assert len(piece.tokens) == 2 and texts_of(piece) == [[2, 3, 4], [2, 3, 104, 105], [2, 3, 4]]
    for settings in (APART, PACKED, SHARED):
        long, short = MicroBatch.split(batch, replace(settings, budget=1))
        assert texts_of(long) == [[2, 3, 104, 105]] and texts_of(short) == [[2, 3, 4]] * 2
        assert short.order.tolist() == [0, 2] and short.tokens.numel() == 3


def test_models_that_compute_the_same_texts_decide_their_layout_once() -> None:
    """As the actor and the critic in a mini-batch; a model with another budget has a layout of its own."""
    texts = [(3, 4), (1, 6), (2, 2), (4, 5)]
    split(texts, PACKED)
    decided = PackedPass.all_of.cache_info().misses
    for other in (PACKED, replace(PACKED, dtype=torch.bfloat16)):
        split(texts, other)
    assert PackedPass.all_of.cache_info().misses == decided
    split(texts, replace(PACKED, budget=15))
    split(texts[::-1], PACKED)
    assert PackedPass.all_of.cache_info().misses == decided + 2


def test_an_idle_micro_batch_is_one_row_of_two_tokens() -> None:
    """The last place of the prompt and the first of the response, for a rank that must call without rows."""
    for settings in (APART, SHARED):
        piece = MicroBatch.one_idle(settings, torch.device("cpu"))
        assert piece.idle and not split([(2, 3)], settings)[0].idle
        assert piece.position_ids.tolist() == [[0, 1]]
        assert piece.tokens.shape == (1, 2)
