"""Ranges of measured over predicted time of a step and of its parts, by family of engines.

Rows are predicted by constants that are fitted neither on their system nor on their source. A range has 10 to 90 % of
its rows; a system counts as at most ``LEAST_ROWS``, so that neither one with many rows decides nor one with two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor
from typing import get_args

from benchmarks.calibration.cross_validation import CheckedRow, family_of
from benchmarks.calibration.problems import source_of, system_of
from benchmarks.calibration.rlhf import STEPS
from benchmarks.systems.profiles import SYSTEMS
from flexrlhf.guideline.costs.profiles import EngineFamily, StepPart, accuracy_by_figures

LEAST_ROWS = 8
"""Rows that a family needs for a range of its own."""
SHARES = (0.1, 0.9)
"""Shares of the rows below a range, and below its upper end."""
STEP = 0.05
"""Multiple to which the ends of printed ranges are widened."""
_PARTS: Mapping[str, StepPart | None] = {
    r"reshard$|sync|transition|reallocation": None,
    r"gen": "generation",
    r"train|update": "training",
    r"": "other calls",
}
"""Pattern of a call → part of the step; None: no call of a model."""

Range = tuple[float, float]


def trained_family(row: CheckedRow) -> EngineFamily:
    """Return the family of a published row."""
    if row.row["lora"] not in ("", "no"):
        return "adapters"
    trainer = system_of(row.row, SYSTEMS).trainer
    return "deepspeed" if trainer.startswith("deepspeed") else "torch and megatron"


def part_of(row: CheckedRow) -> StepPart | None:
    """Return the part of a step that a published row measures."""
    if row.prediction.goal == STEPS:
        return "step"
    return next(part for pattern, part in _PARTS.items() if re.search(pattern, row.row["call"]))


def lines(rows: Sequence[CheckedRow]) -> Iterator[str]:
    """Yield each range next to the one that plans are printed with, and how many rows are inside."""
    rows = [row for row in rows if row.fits]
    yield "  measured over predicted, fitted without system and source, 10 to 90 % of the rows; as printed with plans"
    for family in get_args(EngineFamily):
        for part in get_args(StepPart):
            chosen = _of(rows, family, part)
            found, printed = range_of(rows, family, part), accuracy_by_figures(family, part)
            if found is None:
                continue
            inside = sum(printed.low <= row.ratio <= printed.high for row in chosen)
            wider = "" if len(chosen) >= LEAST_ROWS else "; too few: the wider of theirs and of the family's steps"
            ends = f"{found[0]:.2f} to {found[1]:.2f}; {printed.low:.2f} to {printed.high:.2f}"
            yield f"    {family}, {part}: {ends}, {inside} of {len(chosen)} inside{wider}"
    yield f"    {_unseen(rows)}"


def range_of(rows: Sequence[CheckedRow], family: EngineFamily, part: StepPart) -> Range | None:
    """Return the range of a part, with that of the family's steps if it has few rows; None without enough of both."""
    own = _of(rows, family, part)
    if len(own) >= LEAST_ROWS:
        return _quantiles(own)
    steps = _of(rows, family, "step")
    if part == "step" or len(steps) < LEAST_ROWS:
        return None
    low, high = _quantiles(steps)
    return (min(low, *(row.ratio for row in own)), max(high, *(row.ratio for row in own))) if own else (low, high)


def widened(ends: Range) -> Range:
    """Return a range that ends at multiples of ``STEP``."""
    return STEP * floor(ends[0] / STEP), STEP * ceil(ends[1] / STEP)


def _of(rows: Sequence[CheckedRow], family: EngineFamily, part: StepPart) -> list[CheckedRow]:
    return [row for row in rows if part_of(row) == part and family in ("figures", trained_family(row))]


def _quantiles(rows: Sequence[CheckedRow]) -> Range:
    counts = Counter(family_of(row.row) for row in rows)
    weights = {name: min(count, LEAST_ROWS) / count for name, count in counts.items()}
    total = sum(weights[family_of(row.row)] for row in rows)
    ends, below = list[float](), 0.0
    for row in sorted(rows, key=lambda row: row.ratio):
        below += weights[family_of(row.row)]
        while len(ends) < len(SHARES) and below >= SHARES[len(ends)] * total:
            ends.append(row.ratio)
    return ends[0], ends[1]


def _unseen(rows: Sequence[CheckedRow]) -> str:
    """Return how many steps are in the range of the other sources of their family, or of all if these are few."""
    steps = [row for row in rows if part_of(row) == "step"]
    inside = 0
    for row in steps:
        others = [each for each in steps if source_of(each.row) != source_of(row.row)]
        low, high = widened(range_of(others, trained_family(row), "step") or _quantiles(others))
        inside += low <= row.ratio <= high
    return f"steps in the range of their family's other sources: {inside} of {len(steps)}"
