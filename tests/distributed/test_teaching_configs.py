"""Example configs of algorithms run unchanged on the quick start's models and data; others are marked as plans."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from commands import start

from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart import CORPUS, config_paths
from flexrlhf.data.quickstart.corpus import write_corpus

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS, PLANS = "# Runs on the quick start: ", "# Plan only: "
FILES = sorted(CONFIGS.glob("*.yaml"))
TEACHING = [file.stem for file in FILES if file.read_text().startswith(RUNS)]
SOME = ["dpo", "gspo"]
"""Configs in the ordinary suite: a Python function in a worker, and pairs."""
STEPS = 2


def train(directory: Path, names: list[str]) -> Path:
    """Train the quick start's models for two steps, and the configs that start from them, in one launch."""
    shutil.copytree(CONFIGS, directory / "configs")
    write_corpus(directory / CORPUS)
    models = [str(path) for path in config_paths()[:2]]
    process = start(["run", *models, *(f"configs/{name}.yaml" for name in names), "--set", f"steps={STEPS}"], directory)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out[-3000:]
    return directory / "runs"


def check(runs: Path, name: str) -> None:
    """Every step has metrics, and the trained models are saved."""
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert not any(row.get("score_failed") for row in rows)
    files = {path.name for path in (runs / name / "actor").iterdir()}
    assert files & {"model.safetensors", "adapter_model.safetensors"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_first_line_describes_a_config(file: Path) -> None:
    first = file.read_text().splitlines()[0]
    assert first.startswith((RUNS, PLANS)) and len(first) > len(RUNS) + 20, first
    spec = load_spec(file)
    if file.stem in TEACHING:
        assert spec.name == file.stem and spec.cluster.num_devices == 2 and not spec.cluster.nodes
        assert not any(model.init for _, model in spec.models if model is not None)


def test_some_configs_run_on_the_quick_start(tmp_path: Path) -> None:
    runs = train(tmp_path, SOME)
    for name in SOME:
        check(runs, name)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_config_that_teaches_runs_on_the_quick_start(tmp_path: Path) -> None:
    assert len(TEACHING) >= 17 and set(SOME) <= set(TEACHING)
    runs = train(tmp_path, TEACHING)
    for name in TEACHING:
        check(runs, name)
