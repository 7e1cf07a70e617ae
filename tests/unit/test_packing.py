"""Layout of texts in passes: every text once, within the budget, with little padding, prompts once where shared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import pytest

from flexrlhf.memory.packed_rows import PackedPass, TextGroup, TextPacking, shared

BUDGET = 8192


def uneven(count: int, seed: int = 0) -> tuple[tuple[TextGroup, ...], ...]:
    """Sequences as people write them: prompts of 129 tokens in the mean and up to 512, responses of 40."""
    rng = random.Random(seed)
    prompts = [min(512, max(8, int(rng.lognormvariate(4.6, 0.75)))) for _ in range(count)]
    return tuple((TextGroup(prompt, (max(1, int(rng.expovariate(1 / 40))),)),) for prompt in prompts)


def padding(units: Sequence[Sequence[TextGroup]], passes: Sequence[PackedPass]) -> float:
    """Computed tokens for each real one."""
    return sum(each.tokens for each in passes) / sum(group.tokens for group in chain(*units))


@pytest.mark.parametrize("count", [16, 64, 128, 1024])
def test_few_computed_tokens_are_padding(count: int) -> None:
    units = uneven(count)
    assert padding(units, PackedPass.all_of(units, BUDGET)) <= 1.1
    apart = PackedPass.all_of(units, BUDGET, together=False)
    assert padding(units, apart) <= 1.2
    assert all(len(row) == 1 for each in apart for row in each.rows)


@pytest.mark.parametrize("together", [True, False])
def test_every_group_has_one_place_within_the_budget(together: bool) -> None:
    rng = random.Random(1)
    for _ in range(200):
        samples = rng.randint(1, 4)
        units = tuple(
            tuple(TextGroup(rng.randint(0, 9), (rng.randint(1, 9),)) for _ in range(samples))
            for _ in range(rng.randint(1, 12))
        )
        budget = rng.randint(1, 120)
        passes = PackedPass.all_of(units, budget, together)
        places = [place for each in passes for row in each.rows for place in row]
        assert sorted(places) == [(unit, index) for unit in range(len(units)) for index in range(samples)]
        for each in passes:
            tokens = [sum(units[place.unit][place.group].tokens for place in row) for row in each.rows]
            assert max(tokens) == each.width
            largest = max(samples * max(group.tokens for group in units[unit]) for unit in each.units)
            assert each.tokens <= max(budget, largest)
        units_of_passes = [unit for each in passes for unit in each.units]
        assert sorted(units_of_passes) == list(range(len(units))), "a unit in two passes"


def test_rows_by_hand() -> None:
    """10 tokens in rows as wide as the longest text: 6 | 4 2, or apart 6 | 4 | 2."""
    units = ((TextGroup(1, (1,)),), (TextGroup(4, (2,)),), (TextGroup(3, (1,)),))
    (each,) = PackedPass.all_of(units, 100)
    assert (each.rows, each.width) == ((((1, 0),), ((2, 0), (0, 0))), 6)
    (apart,) = PackedPass.all_of(units, 100, together=False)
    assert (apart.rows, apart.width) == ((((1, 0),), ((2, 0),), ((0, 0),)), 6)
    first, second = PackedPass.all_of(units, 6)
    assert (first.rows, second.rows) == ((((1, 0),),), (((2, 0), (0, 0)),))


def test_a_text_above_the_budget_is_alone() -> None:
    units = ((TextGroup(90, (20,)),), (TextGroup(3, (2,)),))
    assert [(each.units, each.tokens) for each in PackedPass.all_of(units, 50)] == [((0,), 110), ((1,), 5)]


def test_a_prompt_is_computed_once_for_its_samples() -> None:
    group = TextGroup(512, (64,) * 8)
    assert shared(group, BUDGET) == (group,)
    assert 8 * (512 + 64) / group.tokens == 4.5


@pytest.mark.parametrize(
    ("prompt", "response", "number", "budget"),
    [(100, 2048, 16, BUDGET), (512, 64, 8, 800), (4, 500, 64, 100)],
    ids=["long responses", "a small budget", "texts above the budget"],
)
def test_samples_that_would_make_a_row_too_long_get_copies(
    prompt: int, response: int, number: int, budget: int
) -> None:
    parts = shared(TextGroup(prompt, (response,) * number), budget)
    assert len(parts) > 1
    assert sum(len(part.responses) for part in parts) == number
    assert all(part.tokens <= max(budget, prompt + response) for part in parts)
    # attention over long rows costs more than the copies
    assert max(part.tokens for part in parts) < 2 * (prompt + 2 * response)


@pytest.mark.parametrize("shares", [True, False])
def test_a_group_above_the_budget_is_divided(shares: bool) -> None:
    """Sixteen responses of 8k tokens are never in one pass; at least one text is."""
    group = TextGroup(1024, (8192,) * 16)
    for budget, texts in ((0, 1), (9216, 1), (18432, 2), (16 * 9216, 16)):
        units = group.units(budget, shares, compares=False)
        passes = PackedPass.all_of(units, budget, together=True)
        assert [len(each.units) for each in passes] == [texts] * (16 // texts)
        assert all(each.tokens == texts * 9216 for each in passes)
    (whole,) = group.units(0, shares, compares=True)
    (each,) = PackedPass.all_of((whole,), 0)
    assert each.tokens == 16 * 9216


def test_a_group_that_fits_shares_its_prompt() -> None:
    group = TextGroup(512, (64,) * 8)
    assert group.units(BUDGET, True, False) == group.units(BUDGET, True, True) == ((group,),)
    assert len(group.units(BUDGET, False, False)) == 8


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("compares", [True, False])
def test_units_have_every_text_once_and_in_order(shares: bool, compares: bool) -> None:
    rng = random.Random(2)
    for _ in range(200):
        group = TextGroup(rng.randint(1, 90), tuple(rng.randint(1, 60) for _ in range(rng.randint(1, 9))))
        budget = rng.randint(0, 400)
        units = group.units(budget, shares, compares)
        parts = list(chain(*units))
        assert tuple(chain(*(part.responses for part in parts))) == group.responses
        assert {part.prompt for part in parts} == {group.prompt}
        longest = group.prompt + max(group.responses)
        assert max(part.tokens for part in parts) <= max(budget, longest)
        assert len(units) == (1 if compares else len(parts))
        passes = PackedPass.all_of(units, budget)
        if not compares:
            assert max(each.tokens for each in passes) <= max(budget, longest)


def test_the_same_texts_have_the_same_places() -> None:
    decide = PackedPass.all_of.__wrapped__
    assert decide(uneven(200), 3000) == decide(uneven(200), 3000)


@pytest.mark.parametrize(
    ("family", "attention", "window", "expected"),
    [
        ("llama", "sdpa", None, True),
        ("qwen3", "eager", None, True),
        ("mistral", "sdpa", 64, True),
        ("mistral", "sdpa", 63, False),
        ("gemma2", "sdpa", None, False),
        ("gpt2", "sdpa", None, False),
        ("llama", "flash_attention_2", None, True),
        ("gemma2", "flash_attention_2", None, False),
        ("llama", "flex_attention", None, False),
    ],
)
def test_families_that_pack(family: str, attention: str, window: int | None, expected: bool) -> None:
    """A window as long as the longest text restricts none."""
    assert TextPacking.of_family(family, attention, window, 64, packs=True).packs is expected
