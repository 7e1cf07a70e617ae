"""Errors of steps and calls of RLHF by the constants that predict them, and the ranges that follow for a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.calibration import ranges, rlhf
from benchmarks.calibration.cross_validation import (
    CheckedRow,
    checked_rows,
    family_of,
    placement_pairs,
)
from benchmarks.calibration.problems import source_of
from benchmarks.calibration.rows import Prediction, distinct, verdict
from benchmarks.calibration.shared import present, systems_with
from flexrlhf.guideline.costs.profiles import FROM_FIGURES

GOALS = (rlhf.STEPS, rlhf.CALLS)
DEFAULT_GOAL, LEFT_OUT_GOAL, BIAS_GOAL = 0.30, 0.20, 0.10
"""Highest mean errors of steps with the constants of all systems, and without a row's source; highest bias of the
first."""


TIES = (0.0, 0.05, 0.1, 0.25, 0.45)
"""Differences of predictions for which it is counted how often measurements have the same order."""


@dataclass(frozen=True)
class ErrorsByConstants:
    """Errors of predictions by one set of constants.

    name:   which constants
    found:  the predictions
    goals:  goal → highest mean error that meets it
    bias:   highest bias of steps that meets the goal
    """

    name: str
    found: Sequence[Prediction]
    goals: dict[str, float]
    bias: float | None = None

    def text(self) -> str:
        return f"  {self.name:46}" + "".join(self._cells(goal) for goal in GOALS)

    def _cells(self, goal: str) -> str:
        of_goal = [each for each in distinct(self.found) if each.goal == goal]
        if not of_goal:
            return f"{0:6d}{'':42}"
        error, bias = mean(each.error for each in of_goal), mean(each.signed for each in of_goal)
        verdicts = [verdict(error, self.goals.get(goal))]
        if goal == rlhf.STEPS and self.bias is not None:
            verdicts.append(f"bias {verdict(abs(bias), self.bias)}")
        return f"{len(of_goal):6d}{100 * error:8.1f}{100 * bias:+8.1f}  {', '.join(verdicts):24}"


def lines(directory: Path, fitted: Sequence[Prediction]) -> Iterator[str]:
    """Yield the lines of the report. ``fitted``: predictions with the constants of each system."""
    sources, systems = (checked_rows(directory, key) for key in (source_of, family_of))
    default = rlhf.read(directory, systems_with(present())).predictions
    yield "\nRLHF by constants: mean error and bias in % (below 0: predicted too fast); goals"
    yield f"  {'constants':46}{'steps':>6}{'error':>8}{'bias':>8}{'':26}{'calls':>6}{'error':>8}{'bias':>8}"
    for each in (
        ErrorsByConstants("own ones of a few systems (fit)", fitted, {}),
        ErrorsByConstants("those that all systems and plans share", default, {rlhf.STEPS: DEFAULT_GOAL}, BIAS_GOAL),
        ErrorsByConstants(
            "shared, fitted without the row's source", _predictions(sources), dict.fromkeys(GOALS, LEFT_OUT_GOAL)
        ),
        ErrorsByConstants("shared, fitted without the row's system", _predictions(systems), {}),
    ):
        yield each.text()
    yield from _by_source(sources)
    yield from ranges.lines(checked_rows(directory, family_of, source_of))
    yield from _ties(sources)


def _predictions(rows: Sequence[CheckedRow]) -> list[Prediction]:
    return [each.prediction for each in rows]


def _by_source(sources: Sequence[CheckedRow]) -> Iterator[str]:
    """Yield the errors of the steps of each source that the constants were fitted without."""
    steps = [each for each in sources if each.prediction.goal == rlhf.STEPS]
    for name in sorted({source_of(each.row) for each in steps}):
        of_source = [each.prediction for each in steps if source_of(each.row) == name]
        error, bias = mean(each.error for each in of_source), mean(each.signed for each in of_source)
        yield f"    without {name:36} {len(of_source):5d}{100 * error:8.1f}{100 * bias:+8.1f}"


def _ties(sources: Sequence[CheckedRow]) -> Iterator[str]:
    """Yield how often the predicted order of two placements is right, by the difference of their predictions."""
    pairs = placement_pairs(sources)
    for tie in TIES if pairs else ():
        right = [measured > 1 for measured, predicted in pairs if predicted >= 1 + tie]
        yield f"  two placements of one problem, predicted {tie:.0%} apart: order of {sum(right)} of {len(right)} right"
    yield f"  advise takes two placements for equal up to (accuracy.csv): {FROM_FIGURES.tie:.2f}"
