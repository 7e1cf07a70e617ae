"""Which ranks communicate for what. The plan lists the groups, comm/ creates them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Ranks that communicate for one purpose: compute (a placed model), move or sync. Purposes never share a group."""

    purpose: str
    ranks: tuple[int, ...]
