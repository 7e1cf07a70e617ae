"""Transfers of rows between ranks, and the primitives that carry them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Primitive = Literal["none", "all_gather", "point_to_point", "all_to_all"]


@dataclass(frozen=True)
class Transfer:
    """Rows of ``prompts`` of one column, from one rank to another."""

    column: str
    source: int
    destination: int
    prompts: tuple[int, ...]
