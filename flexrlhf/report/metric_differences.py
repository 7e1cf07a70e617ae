"""Largest differences of the metrics of two runs, over the steps that both have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexrlhf.metrics import METRICS, TIMES

SAME = 1e-4
"""Largest difference over the scale of a metric that is called the same: of float32 sums in another order."""
LEAST_SCALE = 1e-2
"""Scale of metrics that are rounding alone, such as the KL of a policy from itself."""
Rows = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class MetricDifference:
    """One metric of two runs.

    name:     of the metric
    first:    its value in the first run, in the last step that both have
    second:   the same of the other run
    largest:  largest absolute difference of a step; infinite where one of the two is no number
    step:     the step with it
    values:   of both runs in that step
    scale:    largest absolute value of the metric in both runs, at least LEAST_SCALE
    """

    name: str
    first: float
    second: float
    largest: float
    step: int
    values: tuple[float, float]
    scale: float

    @property
    def relative(self) -> float:
        """The largest difference over the larger of the two values of its step, without their signs."""
        if self.largest == 0 or math.isinf(self.largest):
            return self.largest
        return self.largest / max(map(abs, self.values))

    @property
    def of_scale(self) -> float:
        """The largest difference over the scale, which tells rounding of a value near 0 from a difference."""
        return self.largest / self.scale

    @property
    def is_same(self) -> bool:
        """Whether the two runs differ by no more than rounding."""
        return self.of_scale <= SAME


def common_steps(runs: Sequence[Rows]) -> list[int]:
    """Return the steps that all runs have."""
    return sorted(set.intersection(*(set(rows) for rows in runs)))


def metric_differences(first: Rows, second: Rows) -> list[MetricDifference]:
    """Return the differences of all metrics that both runs have, times aside, in the order of their definitions."""
    steps = common_steps([first, second])
    defined = [metric.name for metric in METRICS]
    written = sorted({name for rows in (first, second) for row in rows.values() for name in row} - set(defined))
    names = [name for name in (*defined, *written) if name not in (*TIMES, "step")]
    found = [_difference(name, first, second, steps) for name in names]
    return [each for each in found if each is not None]


def _difference(name: str, first: Rows, second: Rows, steps: Sequence[int]) -> MetricDifference | None:
    both = [step for step in steps if _is_number(first[step].get(name)) and _is_number(second[step].get(name))]
    if not both:
        return None
    sizes = {step: _distance(first[step][name], second[step][name]) for step in both}
    worst = max(both, key=lambda step: sizes[step])
    known = [abs(rows[step][name]) for rows in (first, second) for step in both if math.isfinite(rows[step][name])]
    return MetricDifference(
        name,
        first[both[-1]][name],
        second[both[-1]][name],
        sizes[worst],
        worst,
        (first[worst][name], second[worst][name]),
        max([LEAST_SCALE, *known]),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _distance(one: float, other: float) -> float:
    """Return |one - other|; 0 for two that are no numbers or the same infinity."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    size = abs(one - other)
    return size if math.isfinite(size) else math.inf
