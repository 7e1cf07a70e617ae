"""Example configs of algorithms run unchanged on the quick start's models and data; others are marked as plans."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import start

from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart import CORPUS, config_paths
from flexrlhf.data.quickstart.corpus import write_corpus

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS, PLANS = "# Runs on the quick start: ", "# Plan only: "
FILES = sorted(CONFIGS.glob("*.yaml"))
TEACHING = [file.stem for file in FILES if file.read_text().startswith(RUNS)]
SOME = ["agent", "dpo", "gspo"]
"""Configs in the ordinary suite: episodes, pairs, and a Python function in a worker."""
STEPS = 2


def train(directory: Path, names: list[str], settings: Sequence[str] = (f"steps={STEPS}",)) -> Path:
    """Train the quick start's models, and the configs that start from them, in one launch."""
    shutil.copytree(CONFIGS, directory / "configs")
    write_corpus(directory / CORPUS)
    models = [str(path) for path in config_paths()[:2]]
    changes = [word for setting in settings for word in ("--set", setting)]
    process = start(["run", *models, *(f"configs/{name}.yaml" for name in names), *changes], directory)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out[-3000:]
    return directory / "runs"


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]


def check(runs: Path, name: str) -> None:
    """Every step has metrics, and the trained models are saved."""
    rows = metrics(runs, name)
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert not any(row.get("score_failed") or row.get("episode_failed") for row in rows)
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


def test_the_agent_of_the_documents_has_forty_lines() -> None:
    assert len((CONFIGS / "agent.py").read_text().splitlines()) <= 40


@pytest.mark.full
@pytest.mark.timeout(600)
def test_episodes_are_learned(tmp_path: Path) -> None:
    runs = train(tmp_path, ["agent", "word-game"], ())
    agent, game = metrics(runs, "agent"), metrics(runs, "word-game")
    assert agent[0]["reward_mean"] < 0.2 and agent[-1]["reward_mean"] > 0.8
    assert agent[0]["turns_mean"] < 1.2 and agent[-1]["turns_mean"] > 1.8
    assert game[0]["eval_reward_mean"] < 0.1 and game[-1]["eval_reward_mean"] > 0.6
