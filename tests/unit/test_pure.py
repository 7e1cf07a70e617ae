"""Planning imports neither torch nor transformers, and starts at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_runs import PPO

import flexrlhf

HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors"}
PAGE = {"plotly", "jinja2"}
"""What pages of runs and plans are made with."""
PACKAGE = Path(flexrlhf.__file__).parent
PURE_FOLDERS = (
    *("display", "config", "data", "rewards", "operators", "placement"),
    *("weights", "memory", "strategies", "plan", "cli"),
)
PURE_FILES = [
    *("errors.py", "metrics.py", "text.py", "timeline.py", "engines/capabilities.py"),
    *("runs/run_directory.py", "runs/kept_runs.py", "launch/job.py", "launch/execution_engine.py"),
    *(f"report/{name}.py" for name in ("comparison", "metric_differences", "recorded_steps")),
    *(
        str(file.relative_to(PACKAGE))
        for folder in (*PURE_FOLDERS, "guideline/costs", "guideline/simulation")
        for file in sorted((PACKAGE / folder).rglob("*.py"))
        if file.name != "__main__.py"
    ),
]
IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""
PLAN = """
import json, sys
from typer.testing import CliRunner
from flexrlhf.cli import app
results = [CliRunner().invoke(app, command) for command in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.output] for result in results]))
print(json.dumps(sorted(sys.modules)))
"""


def python(code: str, argument: object, directory: Path) -> list[str]:
    command = [sys.executable, "-c", code, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def module_of(file: str) -> str:
    return ".".join(("flexrlhf", *Path(file).with_suffix("").parts)).removesuffix(".__init__")


def test_pure_modules_import_nothing_heavy(tmp_path: Path) -> None:
    modules = [module_of(file) for file in PURE_FILES]
    assert len(modules) > 100
    (loaded,) = python(IMPORT_ALL, modules, tmp_path)
    assert set(modules) <= set(json.loads(loaded))
    assert not HEAVY & set(json.loads(loaded))


def test_planning_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))
    commands = [
        ["plan", "a.yaml"],
        ["plan"],
        ["plan", "a.yaml", "--placement-ratio", "[1,1,0.5,0.5]", "--devices", "2"],
        ["plan", "--help"],
        ["--help"],
    ]
    results, loaded = python(PLAN, commands, tmp_path)
    assert [code for code, _ in json.loads(results)] == [0] * len(commands), results
    assert not (HEAVY | PAGE) & set(json.loads(loaded))


def test_a_page_loads_no_torch(tmp_path: Path) -> None:
    """numpy may be loaded by plotly."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))
    results, loaded = python(PLAN, [["plan", "a.yaml", "--html", "a.html"], ["report", "--help"]], tmp_path)
    assert [code for code, _ in json.loads(results)] == [0, 0], results
    assert HEAVY & set(json.loads(loaded)) <= {"numpy"}
    assert set(json.loads(loaded)) >= PAGE


def test_advice_loads_arrays_and_nothing_heavier(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text("[{count: 1, devices: 4, class: A100-80G}]")
    asked = ["advise", "--model", "qwen2.5-0.5b", "--cluster", "nodes.yaml", "--prompts", "32", "-o", "a.yaml"]
    results, loaded = python(PLAN, [asked, ["simulate", "a.yaml"], ["advise", "--help"]], tmp_path)
    assert [code for code, _ in json.loads(results)] == [0] * 3, results
    assert HEAVY & set(json.loads(loaded)) == {"numpy"}


@pytest.mark.parametrize("command", [("--help",), ("plan", "--help"), ("run", "--help")])
def test_help_starts_and_names_the_options(command: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flexrlhf", *command], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    if len(command) > 1:
        assert "--placement-ratio" in done.stdout and "--set" in done.stdout
