"""Passes that the simulator counts: those that engines make of the same lengths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from flexrlhf.engines.base import Batch
from flexrlhf.engines.micro_batch import MicroBatch
from flexrlhf.engines.pass_settings import PassSettings
from flexrlhf.guideline.costs.cost_model import MeanPass
from flexrlhf.guideline.simulation.calls import MOST_TEXTS, TextLayout, all_passes, mean_pass, text_groups
from flexrlhf.memory.packed_rows import TextGroup
from flexrlhf.operators.columns import Lengths

LONGEST = Lengths(64, 40)
LAYOUTS = {
    "shared": TextLayout(512, packs=True, shares=True),
    "packed": TextLayout(512, packs=True, shares=False),
    "apart": TextLayout(512, packs=False, shares=True),
    "divided": TextLayout(150, packs=True, shares=True),
    "compared": TextLayout(150, packs=True, shares=True, compares=True),
    "by lengths": TextLayout(512, packs=True, shares=True, masks=False),
    "copies by lengths": TextLayout(150, packs=True, shares=False, masks=False),
}


def batch_of(groups: list[TextGroup]) -> Batch:
    """Rows with texts of these lengths, of which no two are the same, as a rollout leaves them."""
    samples = len(groups[0].responses)
    mask = torch.zeros(len(groups) * samples, LONGEST.total, dtype=torch.uint8)
    for row in range(len(mask)):
        group = groups[row // samples]
        mask[row, LONGEST.prompt - group.prompt : LONGEST.prompt + group.responses[row % samples]] = 1
    tokens = torch.ones_like(mask, dtype=torch.int32)
    tokens[:, LONGEST.prompt :] += torch.arange(len(mask), dtype=torch.int32)[:, None]
    columns = {"tokens": tokens, "attention_mask": mask}
    return Batch(columns, torch.arange(len(mask)), samples)


def executed(groups: list[TextGroup], layout: TextLayout) -> list[MicroBatch]:
    """Passes of an engine."""
    settings = PassSettings(LONGEST, layout.budget, layout.packs, layout.shares, masks=layout.masks)
    return list(MicroBatch.split(replace(batch_of(groups), compares=layout.compares), settings))


def pairs_of(piece: MicroBatch, layout: TextLayout) -> int:
    """Pairs of tokens that attention computes in a pass, twice where causality leaves out a half of them."""
    if piece.attended is not None:
        own, *_ = piece.attended.parts
        return 2 * piece.attended.pairs - sum(length for _, length in own.queries)
    return (1 + layout.packs) * piece.tokens.numel() * piece.width


def lengths(most: int, number: int) -> tuple[float, ...]:
    chance = random.Random(most)
    return tuple(float(chance.randint(1, most)) for _ in range(number))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("prompts", "responses"), [((64.0,), (40.0,)), (lengths(64, 12), lengths(40, 48))], ids=["longest", "uneven"]
)
@pytest.mark.parametrize(("count", "samples"), [(12, 4), (13, 1), (1, 4)])
def test_the_simulator_counts_the_passes_of_an_engine(
    prompts: tuple[float, ...], responses: tuple[float, ...], count: int, samples: int, layout: TextLayout
) -> None:
    predicted = mean_pass(prompts, responses, count, samples, layout)
    groups = text_groups(prompts, responses, count, samples)
    passes = executed(groups, layout)
    assert predicted.count == len(passes)
    assert predicted.tokens == pytest.approx(sum(each.tokens.numel() for each in passes))
    pairs = sum(pairs_of(each, layout) for each in passes)
    assert predicted.count * predicted.rows * predicted.width**2 == pytest.approx(pairs)
    assert predicted.count * predicted.responses == pytest.approx(sum(sum(group.responses) for group in groups))
    assert predicted.texts == sum(samples * group.prompt + sum(group.responses) for group in groups)


def test_as_many_texts_as_lengths_have_each_length_once() -> None:
    prompts, responses = lengths(64, 6), lengths(40, 24)
    groups = text_groups(prompts, responses, 6, 4)
    assert sorted(prompts) == [group.prompt for group in groups]
    assert sorted(responses) == sorted(response for group in groups for response in group.responses)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_of_many_texts_passes_are_in_proportion(layout: TextLayout) -> None:
    """As if all had been laid out, to a twentieth: more texts are a little easier to lay out."""
    prompts, responses, count = lengths(64, 50), lengths(40, 50), 8 * MOST_TEXTS
    found = mean_pass(prompts, responses, count, 1, layout)
    passes = layout.passes(text_groups(prompts, responses, count, 1))
    assert found.tokens == pytest.approx(sum(each.tokens for each in passes), rel=0.05)
    assert found.count == pytest.approx(len(passes), rel=0.05)


def test_no_pass_of_many_texts_is_above_the_budget() -> None:
    """Those that are laid out fit into one pass."""
    found = mean_pass(lengths(64, 50), lengths(40, 50), 256 * MOST_TEXTS, 1, TextLayout(10**6, packs=True, shares=True))
    assert found.count == pytest.approx(found.tokens / 10**6) and found.count > 2


def test_passes_of_several_mini_batches_add_up() -> None:
    layout = LAYOUTS["shared"]
    parts = [mean_pass((64.0,), (40.0,), count, 4, layout) for count in (3, 8)]
    both = all_passes([(2, parts[0]), (1, parts[1])])
    assert both.count == 2 * parts[0].count + parts[1].count
    assert both.tokens == pytest.approx(2 * parts[0].tokens + parts[1].tokens)
    assert both.texts == 2 * parts[0].texts + parts[1].texts
    assert isinstance(both, MeanPass) and both.width == pytest.approx(2 * 224)
