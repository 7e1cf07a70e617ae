"""The constants of the systems of the field, fitted: ``python -m benchmarks.calibration.system_fit DIRECTORY``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.calibration.descent import descend, mean_and_square
from benchmarks.calibration.problems import Catalogue, LeftOut, system_of
from benchmarks.calibration.rlhf import predict, rows_of
from benchmarks.calibration.rows import Row, read_models
from benchmarks.systems.profiles import SYSTEMS, System

Family = tuple[str, ...]
Knob = tuple[Family, str]
"""Systems that share a constant, and its name."""

_FLEX = ("deepspeed-chat", "flexrlhf, interleaving 1", "flexrlhf, interleaving 2")
_REAL, _REAL_V1 = ("real, heuristic", "real", "real, no graphs"), ("real v1, heuristic", "real v1")
_FIELDS: dict[Family, tuple[str, ...]] = {
    _FLEX: ("passes", "gather", "gather_within"),
    ("flexrlhf, disaggregated",): ("passes",),
    ("deepspeed-chat, no hybrid engine",): ("passes",),
    ("deepspeed-chat 0.9, hybrid engine",): ("passes", "launch_seconds"),
    ("deepspeed-chat, hybrid engine",): ("passes", "gather", "launch_seconds", "launch_tp_seconds"),
    ("trlx", "trlx, reward alone"): ("passes", "gather"),
    ("openrlhf",): ("passes", "decode", "sync_gb_s"),
    ("openrlhf, untuned",): ("passes", "gather", "launch_seconds"),
    ("openrlhf, no vllm",): ("passes",),
    ("verl",): ("passes", "decode", "sync_seconds", "sync_gb_s"),
    ("nemo-aligner",): ("passes",),
    ("nemo-rl",): ("passes", "sync_seconds"),
    _REAL: ("passes", "tensor", "gaps"),
    ("real, no graphs",): ("launch_seconds", "launch_tp_seconds"),
    _REAL_V1: ("passes", "tensor", "launch_seconds", "launch_tp_seconds", "gaps"),
}
_CHOSEN: dict[Family, tuple[str, ...]] = {
    _REAL: ("decode_rows",),
    ("trlx", "trlx, reward alone"): ("decode_rows",),
    ("openrlhf",): ("decode_rows",),
}
"""Whole numbers, chosen by hand."""


def fitted() -> dict[str, float]:
    """Return every constant with its present value."""
    pairs = (*_FIELDS.items(), *_CHOSEN.items())
    return {
        f"{field} of {', '.join(names)}": getattr(SYSTEMS[names[0]], field)
        for names, fields in pairs
        for field in fields
    }


def fit(directory: Path) -> dict[Knob, float]:
    """Return the constants of each family with the smallest relative errors of its own rows."""
    models, rows, found = read_models(directory), rows_of(directory), dict[Knob, float]()
    for family, fields in _FIELDS.items():
        own = [row for row in rows if _name(row) in family]
        start = {(family, field): float(getattr(SYSTEMS[family[0]], field)) for field in fields}
        found |= descend(lambda values, own=own: mean_and_square(_errors(own, models, values)), start, rounds=12)
    return found


def _name(row: Row) -> str:
    try:
        return system_of(row, SYSTEMS).name
    except LeftOut:
        return ""


def _errors(rows: list[Row], models: Mapping, values: Mapping[Knob, float]) -> list[float]:
    known = Catalogue(models, dict(_systems(values)))
    return list(_each(rows, known)) or [0.0]


def _each(rows: list[Row], known: Catalogue) -> Iterator[float]:
    for row in rows:
        try:
            yield predict(row, known).error
        except LeftOut:
            continue


def _systems(values: Mapping[Knob, float]) -> Iterator[tuple[str, System]]:
    """Yield all systems with ``values`` in place of their own constants; gaps are at most half of a step."""
    for name, system in SYSTEMS.items():
        own = {field: value for (family, field), value in values.items() if name in family}
        yield name, replace(system, **own | ({"gaps": min(0.5, own["gaps"])} if "gaps" in own else {}))


def main() -> None:
    for (family, field), value in fit(Path(sys.argv[1])).items():
        print(f"{field} of {', '.join(family)}: {value:.3g} (now {getattr(SYSTEMS[family[0]], field):.3g})")


if __name__ == "__main__":
    main()
