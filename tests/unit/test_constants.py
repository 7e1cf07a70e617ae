"""The tables of fitted constants: every row says what its numbers are from, and only what it may say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.systems import engines as field_engines
from benchmarks.systems.profiles import SYSTEMS
from flexrlhf.guideline import costs
from flexrlhf.guideline.costs.profiles import named_rows, read_table

PACKAGE, FIELD = Path(costs.__file__).parent, Path(field_engines.__file__).parent
TABLES = sorted((*PACKAGE.glob("*.csv"), *FIELD.glob("*.csv")))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_row_has_its_source(path: Path) -> None:
    rows = read_table(path)
    assert rows and len({row["name"] for row in rows}) == len(rows)
    assert all(row["source"] for row in rows)


def test_a_systems_engines_are_in_the_tables() -> None:
    for system in SYSTEMS.values():
        assert system.trainer in field_engines.PROFILES
        assert system.generator in field_engines.DECODERS


@dataclass(frozen=True)
class Point:
    name: str
    x: float
    even: bool = False


def test_cells_become_fields(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text('name,  x,      even, source\nfirst, 0.1e-3, yes,  a paper\nlast,  2,      ,     "a, b"\n')
    assert named_rows(Point, read_table(path)) == {"first": Point("first", 0.1e-3, True), "last": Point("last", 2.0)}
    assert [row["source"] for row in read_table(path)] == ["a paper", "a, b"]


@pytest.mark.parametrize(
    ("row", "error"),
    [({"name": "a", "y": "1"}, KeyError), ({"name": "a", "x": "much"}, ValueError), ({"name": "a"}, TypeError)],
)
def test_a_row_that_does_not_fit_is_refused(row: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        named_rows(Point, [row])
