"""Errors on systems and sources that the shared constants are not fitted on.

The fit without some rows takes a linear model of the logarithm of each prediction in the logarithms of the constants;
its result predicts the rows that were left out without that approximation.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from pathlib import Path

from benchmarks.calibration.descent import descend, mean_and_square
from benchmarks.calibration.problems import Catalogue, LeftOut, source_of, system_of
from benchmarks.calibration.rlhf import STEPS, predict, rows_of
from benchmarks.calibration.rows import Prediction, Row, read_models
from benchmarks.calibration.shared import ASSUMED, Constants, present, systems_with, tables_with
from benchmarks.systems.profiles import SYSTEMS
from flexrlhf.guideline.costs.cost_model import Transformer

STEP = 1.15
"""Factor by which a constant is varied to see its effect."""
MOST_ERROR = 3.0
"""Relative error above which a row pulls no harder."""
LEAST_SECONDS = 1e-6
MOST_ROWS = 8
"""Rows that a publication counts as, at most: one with many rows does not decide."""
PULL = 0.003
"""Loss for a constant that differs from its assumed value by a factor of e."""


@dataclass(frozen=True)
class CheckedRow:
    """A row, and its prediction by constants that are not fitted on it."""

    row: Row
    prediction: Prediction

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.prediction.measured / max(self.prediction.predicted, LEAST_SECONDS)

    @property
    def fits(self) -> bool:
        return self.prediction.predicted > 0


@dataclass(frozen=True)
class LinearRow:
    """A row near the present constants.

    row:        the row
    measured:   measured seconds
    predicted:  seconds that the present constants give
    slopes:     constant → relative change of the prediction with a relative change of the constant
    """

    row: Row
    measured: float
    predicted: float
    slopes: Mapping[str, float]

    def error(self, values: Constants, start: Constants) -> float:
        change = sum(slope * log(values[name] / start[name]) for name, slope in self.slopes.items())
        return min(MOST_ERROR, abs(self.predicted * exp(change) / self.measured - 1))


def family_of(row: Row) -> str:
    """Return the system of a row in any of its versions."""
    return next((name for name in _FAMILIES if row["system"].startswith(name)), row["system"])


_FAMILIES = ("DeepSpeed-Chat", "FlexRLHF", "trlX", "OpenRLHF", "ReaL", "NeMo-RL", "NeMo-Aligner", "verl")


def checked_rows(directory: Path, *keys: Callable[[Row], str]) -> list[CheckedRow]:
    """Return every row, predicted by constants that are fitted without any row with one of the same ``keys``."""
    models, start = read_models(directory), present()
    rows = linear_rows(rows_of(directory), models, start)
    found, groups = [], defaultdict[tuple[str, ...], list[Row]](list)
    for each in rows:
        groups[tuple(key(each.row) for key in keys)].append(each.row)
    for names, group in sorted(groups.items()):
        others = [each for each in rows if all(key(each.row) != name for key, name in zip(keys, names, strict=True))]
        found += list(_predicted(group, models, fit(others, start)))
    return found


def fit(rows: Sequence[LinearRow], start: Constants) -> dict[str, float]:
    """Return the constants with the smallest errors of ``rows``, and those that no row depends on as assumed.

    ``start``: constants that the rows are linear around."""

    counts = Counter(source_of(each.row) for each in rows)
    weights = [min(1.0, MOST_ROWS / counts[source_of(each.row)]) for each in rows]

    def loss(values: Constants) -> float:
        apart = sum(log(value / ASSUMED[name]) ** 2 for name, value in values.items())
        return mean_and_square([each.error(values, start) for each in rows], weights) + PULL * apart

    return descend(loss, start)


def linear_rows(rows: Sequence[Row], models: Mapping[str, Transformer], start: Constants) -> list[LinearRow]:
    """Return the predictable rows, with the effect of each constant."""
    base = {each.row["id"]: each for each in _predicted(rows, models, start)}
    slopes: dict[str, dict[str, float]] = {name: {} for name in base}
    for constant, value in start.items():
        varied = _predicted(rows, models, {**start, constant: STEP * value})
        for each in varied:
            before = base.get(each.row["id"])
            if before is not None and before.fits and each.fits:
                change = before.ratio / each.ratio
                slopes[each.row["id"]][constant] = log(change) / log(STEP)
    return [
        LinearRow(each.row, each.prediction.measured, max(each.prediction.predicted, LEAST_SECONDS), slopes[name])
        for name, each in base.items()
    ]


def _predicted(rows: Sequence[Row], models: Mapping[str, Transformer], values: Constants) -> Iterator[CheckedRow]:
    known = Catalogue(models, systems_with(values), tables_with(values))
    for row in rows:
        try:
            yield CheckedRow(row, predict(row, known))
        except LeftOut:
            continue


def placement_pairs(rows: Sequence[CheckedRow]) -> list[tuple[float, float]]:
    """Return, for each two placements of one problem on the same engines, the measured and the predicted time of the
    one with the longer prediction, relative to the other."""
    problems: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for each in rows:
        if each.prediction.goal == STEPS and each.fits:
            problems[_problem_key(each.row)].append(each.prediction)
    pairs = (sorted(pair, key=lambda each: each.predicted) for of in problems.values() for pair in combinations(of, 2))
    return [(slow.measured / fast.measured, slow.predicted / fast.predicted) for fast, slow in pairs]


def _problem_key(row: Row) -> tuple[str, ...]:
    system = system_of(row, SYSTEMS)
    sizes = ("group", "gpu", "model", "actor_b", "critic_b", "n_gpus", "gen_len", "global_batch")
    return (system.trainer, system.generator, *(row[name] for name in sizes))
