"""``ExecutionEngine`` with real ranks: a script trains as the command does, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from assets import SIZES
from cases import Case, make_assets
from commands import PROGRAM, start

from flexrlhf.metrics import METRICS
from flexrlhf.runs.run_directory import RunDirectory

SECONDS = 90
SCRIPT = """
import json, signal, sys
from flexrlhf import ExecutionEngine

before = signal.getsignal(signal.SIGINT)
result = ExecutionEngine("script.yaml", *sys.argv[1:], placement_ratio=[1, 1, 0.5, 0.5])()
assert signal.getsignal(signal.SIGINT) is before
print(json.dumps([str(result.directory), result.metrics]))
"""
"""Without a guard for ``__main__``, and with something to do after the ranks have ended."""


def run(arguments: list[str], directory: Path, program: Sequence[str] = PROGRAM) -> str:
    process = start(arguments, directory, program)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out[-2000:]
    return out


@pytest.mark.full
def test_a_script_trains_as_the_command_does(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The script's config has other weights and no placement: its arguments replace both."""
    assets = make_assets(tmp_path_factory.mktemp("script"))
    raw = yaml.safe_load(assets.spec(Case("two", "halves", 2)).dump()) | {"runs": "runs", "placement": None}
    write(tmp_path / "command.yaml", raw, "command")
    run(["run", "command.yaml", "--placement-ratio", "[1,1,0.5,0.5]"], tmp_path)
    actor, critic = (raw["models"][role].pop("path") for role in ("actor", "critic"))
    raw["models"]["actor"]["init"] = raw["models"]["critic"]["init"] = {"model_type": "llama", **SIZES}
    write(tmp_path / "script.yaml", raw, "script")
    (tmp_path / "script.py").write_text(SCRIPT)
    out = run([actor, critic], tmp_path, ["script.py"])
    directory, metrics = json.loads(next(line for line in out.splitlines() if line.startswith("[")))
    expected = RunDirectory(tmp_path / "runs" / "command").metrics.read()
    assert (directory, len(metrics)) == ("runs/script", raw["steps"])
    timeless = [
        [{name: row[name] for name in row.keys() - METRICS.times} for row in rows] for rows in (metrics, expected)
    ]
    assert timeless[0] == timeless[1]


def write(path: Path, raw: dict[str, Any], name: str) -> None:
    path.write_text(yaml.safe_dump(raw | {"name": name}))
