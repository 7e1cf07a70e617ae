"""Interleaving: some models on parts of the devices, side by side, so that their operators of one wave overlap.

The order is that of co-located: ranks skip the instructions that do not name them, which is the overlap.
"""

from __future__ import annotations

from flexrlhf.placement.placed import Placement
from flexrlhf.strategies.schedule import by_wave

NAME = "interleaving"
order = by_wave


def matches(placement: Placement) -> bool:
    """Whether ``placement`` is run by this strategy."""
    return not placement.shadows and any(len(model.ranks) < placement.num_ranks for model in placement.models)
