"""Several sources of training rows: their shares, and an order that follows from seed and step alone."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from small_runs import plan_of

from flexrlhf.data.order import MAX_BLOCK, DataOrder, SourceShare, step_indices
from flexrlhf.errors import UserError

SHARES = (SourceShare(5, 7), SourceShare(100, 2), SourceShare(1, 1))
MIXED = "data={sources: [{path: a.jsonl, weight: 0.7}, {path: b.csv, weight: 0.3, form: question, system: Hi}]}"


def source_of(index: int) -> int:
    return 0 if index < 5 else 1 if index < 105 else 2


def test_every_block_has_each_source_as_often_as_its_weight() -> None:
    stream = [i for step in range(60) for i in DataOrder(3, SHARES).indices(step, 5)]
    for start in range(0, len(stream), 10):
        assert Counter(map(source_of, stream[start : start + 10])) == {0: 7, 1: 2, 2: 1}


def test_examples_of_a_source_come_once_an_epoch_of_its_own() -> None:
    stream = [i for step in range(60) for i in DataOrder(3, SHARES).indices(step, 5)]
    first = [i for i in stream if source_of(i) == 0]
    assert all(sorted(first[start : start + 5]) == list(range(5)) for start in range(0, len(first) - 4, 5))
    second = [i for i in stream if source_of(i) == 1]
    assert len(set(second)) == len(second) == 60


@pytest.mark.parametrize("prompts", [1, 3, 8, 25])
def test_the_order_follows_from_seed_and_step_alone(prompts: int) -> None:
    stream = DataOrder(3, SHARES).indices(0, 200)
    assert (
        stream == [i for step in range(200 // prompts + 1) for i in DataOrder(3, SHARES).indices(step, prompts)][:200]
    )
    assert DataOrder(3, SHARES).indices(4, prompts) == stream[4 * prompts : 5 * prompts]
    assert DataOrder(4, SHARES).indices(0, 200) != stream


def test_one_source_is_the_order_of_one_file() -> None:
    assert DataOrder(0, [SourceShare(20)]).indices(5, 8) == step_indices(0, 5, 8, 20)


def test_equal_sources_have_orders_of_their_own() -> None:
    stream = DataOrder(0, [SourceShare(20), SourceShare(20)]).indices(0, 40)
    first, second = [i for i in stream if i < 20], [i - 20 for i in stream if i >= 20]
    assert sorted(first) == sorted(second) and first != second


def test_weights_are_whole_parts() -> None:
    assert SourceShare.whole_parts([Fraction("0.7"), Fraction("0.3")]) == [7, 3]
    assert SourceShare.whole_parts([Fraction(1), Fraction(1), Fraction(1)]) == [1, 1, 1]
    assert SourceShare.whole_parts([Fraction("1/3"), Fraction("0.5")]) == [2, 3]
    with pytest.raises(UserError, match=r"weights 0\.123457, 1 are parts of 1/1123457 of the prompts, finer than 1/"):
        SourceShare.whole_parts([Fraction("0.123457"), Fraction(1)])
    assert sum(SourceShare.whole_parts([Fraction(1), Fraction(MAX_BLOCK - 1)])) == MAX_BLOCK


def test_sources_have_the_settings_of_data_where_they_have_none() -> None:
    plan = plan_of(None, 1, MIXED, "data.form=pairs", "eval={path: c.parquet, columns: {prompt: q}}")
    first, second, evaluation = plan.data.sources
    assert (first.key, first.path, first.form, first.parts) == ("data.sources.0", "a.jsonl", "pairs", 7)
    assert (second.setting, second.form, second.parts) == ("data.sources.1.path", "question", 3)
    assert first.is_training and second.is_training and not evaluation.is_training
    assert (first.layout.system, second.layout.system) == (None, "Hi")
    assert (evaluation.form, evaluation.layout.columns) == ("pairs", {"prompt": "q"})
