"""Accuracy of predicted steps: how far measured seconds are from them, by what a prediction rests on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexrlhf.guideline.costs.constants import named_rows, read_rows


@dataclass(frozen=True)
class Accuracy:
    """Range of measured over predicted seconds of a step.

    name:  what the predictions rest on: figures of the device classes, or measurements of the devices
    low:   least value of the range
    high:  most value of the range
    share: share of the rows that are in it
    tie:   relative difference that the predictions of two placements need, so that measurements give the same order in
           four of five cases
    """

    name: str
    low: float
    high: float
    share: float
    tie: float

    def seconds(self, predicted: float) -> tuple[float, float]:
        """Return the seconds between which a ``share`` of the measurements are, for a prediction."""
        return self.low * predicted, self.high * predicted

    def has(self, measured: float, predicted: float) -> bool:
        low, high = self.seconds(predicted)
        return low <= measured <= high


def read_accuracies(path: Path) -> dict[str, Accuracy]:
    """Return the rows of a table by name."""
    return named_rows(Accuracy, read_rows(path))


_ACCURACIES = read_accuracies(Path(__file__).with_suffix(".csv"))
FIGURES, MEASUREMENTS = _ACCURACIES["figures"], _ACCURACIES["measurements"]
