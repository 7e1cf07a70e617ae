"""Metrics of a run by step, in arrays: a row of a million steps takes a hundred bytes and not a kilobyte."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Series:
    """A metric over the steps that have it.

    steps:   ascending
    values:  one a step
    """

    steps: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass
class _Column:
    """Values of one metric, and the places of their steps."""

    places: array[int] = field(default_factory=lambda: array("I"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricTable:
    """Numbers in the rows of metrics; texts are left out."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Take ``rows``, of a step that is there again the last one."""
        self.steps = array("q")
        self._columns: dict[str, _Column] = {}
        for place, row in enumerate(rows):
            self.steps.append(row["step"])
            for name, value in row.items():
                if name != "step" and (number := _number(value)) is not None:
                    column = self._columns.setdefault(name, _Column())
                    column.places.append(place)
                    column.values.append(number)
        if any(one >= other for one, other in zip(self.steps, self.steps[1:], strict=False)):
            self._sort()

    def _sort(self) -> None:
        """Put the steps in order, each once."""
        last = {step: place for place, step in enumerate(self.steps)}
        self.steps = array("q", sorted(last))
        moved = {last[step]: place for place, step in enumerate(self.steps)}
        for name, column in [*self._columns.items()]:
            pairs = zip(column.places, column.values, strict=True)
            kept = sorted((moved[place], value) for place, value in pairs if place in moved)
            places = array("I", (place for place, _ in kept))
            self._columns[name] = _Column(places, array("d", (value for _, value in kept)))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """Metrics, in the order of the rows that have them first."""
        return [name for name, column in self._columns.items() if column.places]

    def series(self, name: str) -> Series:
        """Return a metric; an empty one if no step has it."""
        column = self._columns.get(name)
        if column is None:
            return Series((), ())
        steps = self.steps
        if len(column.places) < len(steps):
            steps = array("q", (steps[place] for place in column.places))
        return Series(steps, column.values)

    def last(self, name: str) -> float | None:
        """Return a metric of the last step; None if that has none."""
        column = self._columns.get(name)
        is_there = column is not None and bool(column.places) and column.places[-1] == len(self.steps) - 1
        return column.values[-1] if column is not None and is_there else None

    def rows(self, places: Iterable[int]) -> Iterator[Mapping[str, Any]]:
        """Yield the rows at ``places``, as mappings."""
        for place in places:
            row: dict[str, Any] = {"step": self.steps[place]}
            for name, column in self._columns.items():
                at = bisect_left(column.places, place)
                if at < len(column.places) and column.places[at] == place:
                    row[name] = column.values[at]
            yield row

    def place(self, step: int) -> int:
        """Return the place of the first row of ``step`` or later."""
        return bisect_left(self.steps, step)


def _number(value: object) -> float | None:
    """Return a value as a float; None for one that is no number or too large for one."""
    if type(value) is float:
        return value
    try:
        return float(value) if type(value) is int else None
    except OverflowError:
        return None
