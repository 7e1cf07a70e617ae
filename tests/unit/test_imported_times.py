"""``benchmarks.imported_times``: its table, and rows whose recipes are in a small repository."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import imported_times
from benchmarks.imported_recipes import RECIPES
from flexrlhf.placement.devices import DeviceClass

JOBS = Path(__file__).parents[1] / "fixtures" / "imports"


def rows() -> list[dict[str, str]]:
    with imported_times.TABLE.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_rows_of_the_table_name_repositories_classes_and_lengths() -> None:
    names = [row["id"] for row in rows()]
    assert len(set(names)) == len(names)
    for number, row in enumerate(rows()):
        assert row["repository"] in RECIPES and row["device"] in DeviceClass.KNOWN and row["source"]
        assert row["fitted"] in ("yes", "no") and float(row["seconds"]) > 0
        assert row["response"] in ("solved", *names[:number]) or float(row["response"]) > 0


def test_a_published_time_is_compared_and_a_length_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "verl"
    repository.mkdir()
    (repository / "job.sh").write_text((JOBS / "verl_off_policy.sh").read_text())
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "job")):
        subprocess.run(("git", *words), cwd=repository, check=True)
    row = {"repository": "verl", "commit": "HEAD", "file": "job.sh", "device": "H100-80G", "devices": "8"}
    row |= {"prompt": "100", "fitted": "no", "source": "a test", "variables": "", "settings": "seed=1", "rows": ""}
    table = [
        row | {"id": "long", "response": "solved", "seconds": "3"},
        row | {"id": "slow", "response": "long", "seconds": "30"},
    ]
    monkeypatch.setattr(imported_times, "TABLE", tmp_path / "times.csv")
    with imported_times.TABLE.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, table[0])
        writer.writeheader()
        writer.writerows(table)
    monkeypatch.setattr(sys, "argv", ["imported_times", str(tmp_path)])
    imported_times.main()
    printed = capsys.readouterr().out
    assert re.search(r"\| long \|.*\| 1.00 \| [\d.]+ to [\d.]+ \| solved \| no \|", printed)
    assert re.search(r"\| slow \|.*\| 10.00 \| [\d.]+ to [\d.]+ \| \*\*no\*\* \| no \|", printed)
    assert "fitted: no: 0 of 1 inside the range" in printed
