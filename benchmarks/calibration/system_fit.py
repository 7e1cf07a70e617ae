"""The constants of RLHF systems, fitted: ``python -m benchmarks.calibration.system_fit DIRECTORY``.

First those that all systems share (``shared.py``), then overheads of families of systems that have enough rows, each
pulled towards the shared one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

from benchmarks.calibration.cross_validation import fit as shared_fit
from benchmarks.calibration.cross_validation import linear_rows
from benchmarks.calibration.descent import descend, mean_and_square
from benchmarks.calibration.problems import Catalogue, LeftOut, system_of
from benchmarks.calibration.rlhf import predict, rows_of
from benchmarks.calibration.rows import Row, read_models
from benchmarks.calibration.shared import present
from benchmarks.systems.profiles import SYSTEMS, System
from flexrlhf.guideline.costs.analytic import OVERHEADS
from flexrlhf.guideline.costs.cost_model import Transformer

Family = tuple[str, ...]
"""Systems that share their overheads."""
LEAST_ROWS = 3
"""Rows of a family per own constant."""
PULL = 0.01
"""Loss for a constant that differs from the shared one by a factor of e."""

_FIELDS: dict[Family, tuple[str, ...]] = {
    ("deepspeed-chat", "flexrlhf, interleaving 1", "flexrlhf, interleaving 2"): ("passes",),
    ("deepspeed-chat 0.9, hybrid engine",): ("passes",),
    ("deepspeed-chat, hybrid engine",): ("passes",),
    ("deepspeed-chat, no hybrid engine",): ("passes",),
}
"""Families whose own overheads differ from the shared ones by more than their rows scatter, and which."""


def fitted() -> dict[str, float]:
    """Return every constant with its present value: shared by all systems, and of single systems."""
    own = {
        f"{field} of {', '.join(names)}": getattr(SYSTEMS[names[0]].overheads, field)
        for names, fields in _FIELDS.items()
        for field in fields
        if getattr(SYSTEMS[names[0]].overheads, field) != getattr(OVERHEADS, field)
    }
    return present() | own


def fit_own(directory: Path) -> Iterator[tuple[Family, int, dict[str, float]]]:
    """Yield each family with its number of rows and its own overheads."""
    models, rows = read_models(directory), rows_of(directory)
    for family, fields in _FIELDS.items():
        own = [row for row in rows if _name(row) in family]
        predicted = _errors(own, models, family, {})
        if len(predicted) >= LEAST_ROWS * len(fields):
            yield family, len(predicted), _fit_family(own, models, family, fields)


def _fit_family(
    rows: Sequence[Row], models: Mapping[str, Transformer], family: Family, fields: Sequence[str]
) -> dict[str, float]:
    start = {field: float(getattr(OVERHEADS, field)) for field in fields}

    def loss(values: Mapping[str, float]) -> float:
        apart = sum(log(value / start[field]) ** 2 for field, value in values.items())
        return mean_and_square(_errors(rows, models, family, values)) + PULL * apart

    return descend(loss, start, rounds=10)


def _name(row: Row) -> str:
    try:
        return system_of(row, SYSTEMS).name
    except LeftOut:
        return ""


def _errors(
    rows: Sequence[Row], models: Mapping[str, Transformer], family: Family, values: Mapping[str, float]
) -> list[float]:
    known = Catalogue(models, {name: _with(system, family, values) for name, system in SYSTEMS.items()})
    return list(_each(rows, known))


def _with(system: System, family: Family, values: Mapping[str, float]) -> System:
    return replace(system, overheads=replace(OVERHEADS, **values)) if system.name in family else system


def _each(rows: Sequence[Row], known: Catalogue) -> Iterator[float]:
    for row in rows:
        try:
            yield predict(row, known).error
        except LeftOut:
            continue


def main() -> None:
    directory, start = Path(sys.argv[1]), present()
    rows = linear_rows(rows_of(directory), read_models(directory), start)
    for name, value in shared_fit(rows, start).items():
        print(f"{name}: {value:.3g} (now {start[name]:.3g})")
    for family, number, values in fit_own(directory):
        print(f"{', '.join(family)} ({number} rows): {', '.join(f'{name} {v:.3g}' for name, v in values.items())}")


if __name__ == "__main__":
    main()
