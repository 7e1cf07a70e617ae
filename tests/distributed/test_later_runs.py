"""Runs of one command that start from earlier ones' models, and resume after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import Case, make_assets
from commands import start
from peft import PeftConfig
from safetensors.torch import load_file

from flexrlhf.config.data_settings import EvalSpec
from flexrlhf.config.model_settings import LoraSpec
from flexrlhf.config.output_settings import CheckpointSpec, SaveSpec
from flexrlhf.config.spec import Spec


def run(directory: Path, *arguments: str) -> str:
    process = start(["run", "first.yaml", "second.yaml", *arguments], directory)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out[-3000:]
    return out


def steps(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write_runs(directory: Path, spec: Spec, evaluation: str) -> None:
    """SFT of adapters, whose best ones the second run goes on with; it changes nothing."""
    first = spec.model_copy(
        update={
            "name": "first",
            "runs": "runs",
            "steps": 3,
            "eval": EvalSpec(path=evaluation, every=1),
            "save": SaveSpec(best="eval_nll"),
            "checkpoint": CheckpointSpec(every=1),
        }
    )
    actor = spec.models.actor
    assert actor is not None, "SFT has an actor"
    still = actor.optimizer.model_copy(update={"learning_rate": 0.0, "schedule": "constant", "warmup_steps": 0})
    further = actor.model_copy(update={"path": "runs/first/actor-best", "lora": LoraSpec(), "optimizer": still})
    models = spec.models.model_copy(update={"actor": further})
    second = first.model_copy(update={"name": "second", "models": models, "eval": None, "save": SaveSpec()})
    (directory / "first.yaml").write_text(first.dump())
    (directory / "second.yaml").write_text(second.dump())


def test_a_later_run_starts_from_the_best_adapters_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    assets = make_assets(tmp_path_factory.mktemp("later"))
    spec = assets.spec(Case("sft-adapters", "all", 2))
    write_runs(tmp_path, spec, str(assets.directory / "sft-evaluation.jsonl"))
    run(tmp_path)
    best, last = (
        load_file(tmp_path / f"runs/{name}/adapter_model.safetensors") for name in ("first/actor-best", "second/actor")
    )
    assert best.keys() == last.keys() and all(torch.equal(best[name], last[name]) for name in best)
    assert PeftConfig.from_pretrained(tmp_path / "runs/second/actor").base_model_name_or_path == assets.model("actor")
    out = run(tmp_path, "--resume", "auto", "--set", "second:steps=5")
    assert "first: finished, skipped" in out and "second  step 3/" not in out and "second  step 5/5" in out
    assert steps(tmp_path / "runs/first") == [0, 1, 2] and steps(tmp_path / "runs/second") == [0, 1, 2, 3, 4]
