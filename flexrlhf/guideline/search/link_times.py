"""Time of a link by the sides of its ends, computed once for all problems that have the link."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.costs.relations import RELATIONS, Relation
from flexrlhf.guideline.search.problem import LinkEnd, LinkSeconds


@dataclass(eq=False)
class LinkTimes:
    """Times of a link, and those that have been computed: a sync or a row transfer may have it as its ``seconds``.

    seconds:  computes them.
    numbers:  number of each side of its source, and of its target.
    values:   time by (side, side, relation); NaN where not yet computed.
    """

    seconds: LinkSeconds
    numbers: tuple[dict[Hashable, int], dict[Hashable, int]] = field(default_factory=lambda: ({}, {}))
    values: NDArray[np.float64] = field(default_factory=lambda: np.full((0, 0, len(RELATIONS)), np.nan))

    def __call__(self, source: LinkEnd, to: LinkEnd, relation: Relation) -> float:
        return self.seconds(source, to, relation)

    def make_room(self) -> None:
        """Add the times of sides that are new."""
        missing = [len(numbers) - size for numbers, size in zip(self.numbers, self.values.shape, strict=False)]
        if any(missing):
            self.values = np.pad(self.values, [*((0, more) for more in missing), (0, 0)], constant_values=np.nan)
