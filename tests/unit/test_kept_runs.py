"""Runs of the quick start that are kept: finished, unchanged, with their models; runs after a changed one train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexrlhf.data.quickstart import config_paths
from flexrlhf.plan.pipeline import make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import Resumption
from flexrlhf.runs.run_directory import RunDirectory

SFT, REWARD, PPO = "quickstart-sft", "quickstart-reward", "quickstart-ppo"


def plans_of(*overrides: str) -> list[Plan]:
    """Plans of the quick start; ``NAME:KEY=VALUE`` is for one of its runs."""
    from flexrlhf.cli.options import RunOptions

    return make_plans(RunOptions(set_=list(overrides)).specs())


def finish(plans: Sequence[Plan]) -> None:
    """Write the files of finished runs, with models of one parameter."""
    for plan in plans:
        plan.spec.directory.mkdir(parents=True)
        (plan.spec.directory / "config.yaml").write_text(plan.spec.dump())
        RunDirectory(plan.spec.directory).write_status("finished", plan.spec.steps, plan.spec.steps)
        for path in plan.outputs:
            path.mkdir()
            (path / "config.json").write_text("{}")
            save_file({"weight": torch.zeros(1)}, path / "model.safetensors")


@pytest.fixture(autouse=True)
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finish(plans_of())


def kept(*overrides: str) -> list[str]:
    return [run.plan.spec.name for run in Resumption.kept(plans_of(*overrides)) if run.finished]


def test_all_but_the_last_are_kept() -> None:
    assert len(config_paths()) == 3
    assert kept() == [SFT, REWARD]
    assert kept(f"{PPO}:steps=3", f"{PPO}:placement=[1,1,0.5,0.5]") == [SFT, REWARD]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        (f"{SFT}:steps=3", []),
        (f"{SFT}:models.actor.optimizer.learning_rate=1e-3", []),
        (f"{REWARD}:steps=3", [SFT]),
        ("seed=1", []),
        ("models.actor.engine=deepspeed", []),
        (f"{REWARD}:models.reward.optimizer.learning_rate=0.5", [SFT]),
    ],
)
def test_a_changed_run_trains_again_and_runs_that_start_from_it(override: str, names: list[str]) -> None:
    assert kept(override) == names


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", None),
        ("config.yaml", "name: [\n"),
        ("status.json", None),
        ("status.json", "{}"),
        ("status.json", '{"state": "running", "next_step": 3, "steps": 250}'),
        ("actor/config.json", None),
        ("actor/model.safetensors", None),
        ("actor/model.safetensors.index.json", "{}"),
    ],
)
def test_a_run_of_which_something_is_missing_trains_again(file: str, text: str | None) -> None:
    path = Path("runs") / SFT / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
        (path.parent / "model.safetensors").unlink(missing_ok=True)
    assert kept() == []
