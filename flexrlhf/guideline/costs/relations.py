"""Relations of two sets of ranks, on which depends what crosses between their models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Relation = Literal["same", "overlapping", "disjoint"]
RELATIONS: tuple[Relation, ...] = ("same", "overlapping", "disjoint")


def relation_of(first: Collection[int], second: Collection[int]) -> Relation:
    """Relation of two sets of ranks."""
    both = set(first) & set(second)
    if not both:
        return "disjoint"
    return "same" if len(both) == len(first) == len(second) else "overlapping"


def mesh_relation(start: int, size: int, other_start: int, other_size: int) -> Relation:
    """Relation of two runs of devices, each given by its first device and its size."""
    if start == other_start and size == other_size:
        return "same"
    return "overlapping" if start < other_start + other_size and other_start < start + size else "disjoint"
