"""Planning imports neither torch nor transformers, and starts at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from small_runs import PPO

import flexrlhf

HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors"}
PAGE = {"plotly", "jinja2"}
"""Libraries that pages of runs and plans are made with."""
PACKAGE = Path(flexrlhf.__file__).parent
TORCH = (
    *("comm", "engines", "launch", "measure", "objectives", "runs", "trainer", "verify"),
    "guideline/advice/replanning.py",
)
"""Folders and files whose modules may load torch, but for ``PURE``."""
ARRAYS = ("guideline/advice", "guideline/search", "report")
"""Folders whose modules may load numpy."""
PURE = (
    *("runs/run_directory", "runs/resume", "launch/job"),
    *("launch/preparation", "launch/execution_engine"),
    *("report/side_by_side", "report/run_contents"),
)
"""Modules of folders above that load neither: commands begin with them."""
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


def modules(folders: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Names of ``others`` and of all modules that are not in ``folders``."""
    files = (file.relative_to(PACKAGE) for file in sorted(PACKAGE.rglob("*.py")) if file.name != "__main__.py")
    pure = (file for file in files if not any(file.is_relative_to(folder) for folder in folders))
    names = (str(file.with_suffix("")) for file in pure)
    return [f"flexrlhf/{name}".removesuffix("/__init__").replace("/", ".") for name in (*names, *others)]


@pytest.mark.parametrize(
    ("names", "heavy"),
    [(modules((*TORCH, *ARRAYS), PURE), HEAVY), (modules(TORCH), HEAVY - {"numpy"})],
    ids=["pure", "arrays"],
)
def test_pure_modules_import_nothing_heavy(names: list[str], heavy: set[str], tmp_path: Path) -> None:
    assert len(names) > 100
    (loaded,) = python(IMPORT_ALL, names, tmp_path)
    assert set(names) <= set(json.loads(loaded))
    assert not heavy & set(json.loads(loaded))


@pytest.mark.parametrize("names", [["rewards.worker_calls"], ["environments.sessions", "environments.process_limits"]])
def test_a_process_for_a_users_code_loads_little(names: list[str], tmp_path: Path) -> None:
    (loaded,) = python(IMPORT_ALL, [f"flexrlhf.{name}" for name in names], tmp_path)
    assert not (HEAVY | {"pydantic", "yaml", "rich"}) & set(json.loads(loaded))


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


FIRST_WORDS = """
import io, sys
from flexrlhf.cli import main
class Output(io.StringIO):
    def write(self, text):
        if text.strip() and not self.getvalue().strip():
            print(text.partition(":")[0], sorted({"torch", "transformers"} & set(sys.modules)), file=sys.__stdout__)
        return super().write(text)
sys.stdout, sys.argv = Output(), ["flexrlhf", "plan", "a.yaml"]
try:
    main()
finally:
    sys.__stdout__.flush()
"""


def test_a_plan_is_printed_before_the_libraries_of_a_rank_are_loaded(tmp_path: Path) -> None:
    """Also with data, which are inspected afterwards."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(PPO))
    (tmp_path / PPO["data"]["path"]).write_text('{"prompt": "a"}\n')
    done = subprocess.run([sys.executable, "-u", "-c", FIRST_WORDS], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "test []\n", done.stderr
