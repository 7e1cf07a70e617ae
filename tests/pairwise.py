"""Combinations of parameters of which few have every pair of values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product

import pytest


def pairwise(*factors: Mapping[str, object]) -> list[object]:
    """Return all combinations of the factors' values as parameters, with ids of their names. By default as few run as
    have every pair of values of two factors; all others in `make test-all`."""
    rows = list(product(*factors))
    chosen: list[tuple[str, ...]] = []
    left = set().union(*map(_pairs, rows))
    while left:
        chosen.append(max(rows, key=lambda row: len(left & _pairs(row))))
        left -= _pairs(chosen[-1])
    return [
        pytest.param(
            *(factor[name] for factor, name in zip(factors, row, strict=True)),
            id="-".join(row),
            marks=[pytest.mark.full] * (row not in chosen),
        )
        for row in rows
    ]


def _pairs(row: tuple[str, ...]) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(combinations(enumerate(row), 2))
