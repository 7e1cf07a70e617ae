"""Combinations of parameters of which few have every pair of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product

import pytest


def pairwise(*factors: Iterable[object]) -> list[object]:
    """Return all combinations of the factors' values as parameters; a mapping has the values by id.

    By default as few run as have every pair of values of two factors; the others run in `make test-all`.
    """
    named = [each if isinstance(each, Mapping) else {str(value): value for value in each} for each in factors]
    rows = list(product(*named))
    chosen: list[tuple[str, ...]] = []
    left = set().union(*map(_pairs, rows))
    while left:
        chosen.append(max(rows, key=lambda row: len(left & _pairs(row))))
        left -= _pairs(chosen[-1])
    return [
        pytest.param(
            *(values[name] for values, name in zip(named, row, strict=True)),
            id="-".join(row),
            marks=[pytest.mark.full] * (row not in chosen),
        )
        for row in rows
    ]


def _pairs(row: tuple[str, ...]) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(combinations(enumerate(row), 2))
