"""Configs of random damage: each is a plan or one clear sentence, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from mutated_yaml import mutated_yaml
from outcomes import Case, run_cases
from varied_specs import VariedSpecs

SAMPLE, ALL = 80, 1600
SEED = 3
COMMANDS = (
    ("plan", "a.yaml"),
    ("plan", "a.yaml"),
    ("plan", "a.yaml"),
    ("simulate", "a.yaml"),
    ("run", "--dry-run", "a.yaml"),
)


@pytest.fixture(scope="module")
def specs() -> Iterator[list[dict[str, object]]]:
    yield [raw for raw, _ in islice(VariedSpecs(SEED), 60)]


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_a_damaged_config_is_planned_or_refused_in_one_sentence(
    count: int, specs: list[dict[str, object]], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()

    def case(rng: Random) -> Case:
        content, damage = mutated_yaml(rng, rng.choice(specs))
        Path("a.yaml").write_bytes(content)
        return Case(rng.choice(COMMANDS), damage)

    run_cases(tmp_path / "empty", count, SEED, case).check(least_refused=0.5)
