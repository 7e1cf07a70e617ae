"""``ExecutionEngine``: its arguments stand for settings of the YAML, and a wrong one is an error before any rank."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import PPO, TINY

import flexrlhf
from flexrlhf import ExecutionEngine
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plan

LOADED = """
import json, sys
import flexrlhf
first = sorted(sys.modules)
flexrlhf.ExecutionEngine("a.yaml", placement_ratio=[1, 1, 0.5, 0.5], devices=2)
print(json.dumps([first, sorted(sys.modules)]))
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``a.yaml`` in an empty working directory, next to two model directories."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))
    for name in ("actor", "critic: 1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**TINY, "architectures": []}))
    return "a.yaml"


def test_the_package_loads_nothing_and_an_engine_no_torch(config: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, planned = json.loads(done.stdout)
    assert not {"torch", "pydantic"} & set(first)
    assert not {"torch", "transformers", "numpy"} & set(planned)


def test_public_names_are_found_and_others_are_not() -> None:
    assert dir(flexrlhf) == sorted(flexrlhf.__all__)
    assert flexrlhf.make_plan is make_plan
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = flexrlhf.Engine


def test_model_paths_replace_paths_of_the_config(config: str) -> None:
    models = ExecutionEngine(config, "actor", Path("critic: 1")).plan.spec.models
    assert models.actor is not None and models.critic is not None
    assert (models.actor.path, models.actor.init, models.critic.path) == ("actor", None, "critic: 1")


@pytest.mark.parametrize("ratio", [[1, 1, 0.5, 0.5], (1.0, 1.0, Fraction(1, 2), 0.5), "[1,1,0.5,0.5]", "1,1,1/2,0.5"])
def test_a_placement_ratio_is_a_list_or_a_string(config: str, ratio: Sequence[float | Fraction] | str) -> None:
    plan = ExecutionEngine(config, placement_ratio=ratio, devices=2).plan
    assert (plan.strategy, plan.placement.num_ranks) == ("interleaving", 2)


def test_further_settings_are_overrides(config: str) -> None:
    spec = ExecutionEngine(config, overrides=["steps=7", "name=other"]).plan.spec
    assert (spec.steps, spec.directory) == (7, Path("runs/other"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config_path": "b.yaml"}, "config b.yaml: no such file"),
        ({"actor_model_path": "nowhere"}, "models.actor.path nowhere: no such directory"),
        ({"placement_ratio": [1, 1]}, "entries"),
        ({"placement_ratio": "half"}, "placement"),
        ({"critic_model_path": "actor", "overrides": ["algorithm.name=grpo"]}, "critic"),
    ],
)
def test_a_wrong_argument_is_a_user_error(config: str, arguments: dict[str, Any], words: str) -> None:
    before = sorted(Path().iterdir())
    with pytest.raises(UserError, match=words):
        ExecutionEngine(**{"config_path": config, **arguments})
    assert sorted(Path().iterdir()) == before


def test_a_plan_that_does_not_fit_needs_force(config: str) -> None:
    small = ["cluster={devices: 1, memory_gb: 0.00001}"]
    with pytest.raises(UserError, match="memory: rank 0 needs"):
        ExecutionEngine(config, overrides=small)
    assert ExecutionEngine(config, overrides=small, force=True).plan.placement.num_ranks == 1


def test_a_placement_is_not_chosen_by_every_rank(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(UserError, match="placement: auto of test would be chosen by each of several processes"):
        ExecutionEngine(config, placement_ratio="auto")
