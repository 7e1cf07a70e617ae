"""Options that no other option undercuts in every respect."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexrlhf.guideline.search.problem import Option

Floats = NDArray[np.float64]


def undominated(rows: Floats) -> NDArray[np.int64]:
    """Indices, ascending, of the rows that no other row matches or undercuts in all columns; of equal rows the first.

    ``rows``: (n, figures).
    """
    order = np.lexsort(rows.T[::-1])
    kept: list[int] = []
    for index in order:
        if not kept or not np.any(np.all(rows[kept] <= rows[index], axis=1)):
            kept.append(int(index))
    return np.array(sorted(kept), dtype=np.int64)


def pareto(options: Sequence[Option], has_links: bool) -> list[Option]:
    """Pareto front of (seconds of each task, resting, active) among options on one mesh.

    Where seconds of links depend on the layout, an option is compared with those of its own layout alone.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, option in enumerate(options):
        groups.setdefault(option.layout if has_links else (), []).append(index)
    kept: list[int] = []
    for members in groups.values():
        rows = np.array([[*options[i].seconds, options[i].resting, options[i].active] for i in members])
        kept += [members[i] for i in undominated(rows)]
    return [options[index] for index in sorted(kept)]
