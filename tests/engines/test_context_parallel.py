"""Parts of rows on several ranks: their attention; tests/engines/test_both_heads.py trains with them."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from forked import run_ranks

from flexrlhf.comm.reduce import RankGroup
from flexrlhf.engines.row_split import RowSplit


def test_attention_over_parts_of_rows_is_that_over_whole_rows() -> None:
    """Ulysses and ring of two and four ranks, packed rows with a shared prompt and whole ones, with gradients."""
    run_ranks("row_part_ranks", number=4)


def test_parts_cover_a_row_and_in_a_ring_have_equally_many_tokens_before_them() -> None:
    group = RankGroup(None, (4, 5, 6), lambda work, ranks: None)
    for is_zigzag in (False, True):
        parts = [RowSplit(group, index, is_zigzag).columns(12, index) for index in range(3)]
        assert sorted(np.concatenate(parts)) == list(range(12))
        before = [int(part.sum()) for part in parts]
        assert before == [22, 22, 22] if is_zigzag else before == [6, 22, 38]


def test_a_part_has_the_places_of_its_tokens() -> None:
    """Of two rows of eight tokens the second part has the columns 2 to 5."""
    split = RowSplit(RankGroup(None, (0, 1), lambda work, ranks: None), 1, is_zigzag=True)
    columns, places, numbers = split.part(8, np.array([1, 2, 5, 7, 11, 15]))
    assert columns.tolist() == [2, 3, 4, 5]
    assert numbers.tolist() == [1, 2, 4] and places.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "repeats"), [(4, 2, 2, 1), (4, 2, 4, 2), (12, 2, 4, 2), (12, 4, 6, 3), (8, 8, 4, 1)]
)
def test_keys_are_repeated_as_little_as_ranks_need(heads: int, kv_heads: int, parts: int, repeats: int) -> None:
    assert lcm(kv_heads, parts) == repeats * kv_heads
    assert heads // kv_heads % repeats == 0
