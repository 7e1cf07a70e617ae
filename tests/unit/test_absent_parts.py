"""Planning with explicit placements, and commands, where the parts are missing that not every run needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from absent_parts import write_hook
from small_runs import PPO

COMMANDS = """
import json, sys
from typer.testing import CliRunner
from flexrlhf.cli import app
results = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.stdout, result.stderr] for result in results]))
"""
WORDS = {
    "advise": ["advise", "--model", "llama-7b"],
    "size": ["size", "llama-7b"],
    "simulate": ["simulate", "a.yaml"],
    "profile": ["profile", "a.yaml"],
    "doctor": ["doctor", "a.yaml"],
    "import": ["import", "job.sh"],
    "verify": ["verify", "a.yaml"],
    "report": ["report", "runs/a"],
    "compare": ["compare", "runs/a", "runs/b"],
}
FOLDERS = {"import": "imports", "verify": "verify", "report": "report", "compare": "report"}
FOLDERS |= {"profile": "measure", "doctor": "measure"}
PLANS = (["plan", "a.yaml"], ["plan", "a.yaml", "--set", "placement=auto"], ["plan", "a.yaml", "--html", "a.html"])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of ``PLANS`` and of each command of ``WORDS``."""
    directory = tmp_path_factory.mktemp("absent")
    raw = {**PPO, "placement": [1, 1, 0.5, 0.5], "cluster": {"devices": 2, "device": "cpu"}}
    (directory / "a.yaml").write_text(yaml.safe_dump(raw))
    path = os.pathsep.join(map(str, (write_hook(directory / "hook"), Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([*PLANS, *WORDS.values()])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, error) for code, out, error in json.loads(done.stdout)]


def sentence(what: str, folder: str) -> str:
    return (
        f"{what} needs the part flexrlhf.{folder} of this package, which is not installed; "
        f"pip install --force-reinstall flexrlhf"
    )


def test_an_explicit_placement_is_planned(results: list[tuple[int, str, str]]) -> None:
    (code, out, error), (auto, _, refusal), (page, _, no_page) = results[: len(PLANS)]
    assert code == 0 and "placement" in out, error
    assert sentence("option predictions", "guideline") in error
    assert auto == 2 and refusal == f"flexrlhf: {sentence('chooser search', 'guideline')}\n"
    assert page == 2 and no_page == f"flexrlhf: {sentence('option html', 'report')}\n"


def test_a_missing_command_is_a_sentence(results: list[tuple[int, str, str]]) -> None:
    for name, (code, _, error) in zip(WORDS, results[len(PLANS) :], strict=True):
        assert code == 2
        assert error == f"flexrlhf: {sentence(f'command {name}', FOLDERS.get(name, 'guideline'))}\n"
