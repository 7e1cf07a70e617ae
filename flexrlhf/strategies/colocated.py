"""Co-located: every model on every device; operators run one after another on all of them, and no row moves."""

from __future__ import annotations

from flexrlhf.placement.placed import Placement
from flexrlhf.strategies.schedule import by_wave

NAME = "co-located"
order = by_wave


def matches(placement: Placement) -> bool:
    """Whether ``placement`` is run by this strategy."""
    return not placement.shadows and all(len(model.ranks) == placement.num_ranks for model in placement.models)
