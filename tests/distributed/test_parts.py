"""Runs by parts of another package, and runs of this package without the parts that not every run needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from absent_parts import write_hook
from commands import start
from forked import RANK_ENVIRONMENT
from guests import install_guest
from toys import copying, write_toys

from flexrlhf.metrics import METRICS
from flexrlhf.runs.run_directory import RunDirectory

SECONDS = 120
PPO = {"name": "ppo", "prompts_per_step": 8, "kl": {"coefficient": 0.02}}


def run(directory: Path, raw: dict[str, Any], *options: str, is_forked: bool = False) -> str:
    """Train in a directory and return the output."""
    (directory / "a.yaml").write_text(yaml.safe_dump({**raw, "runs": "runs"}))
    process = start(["run", "a.yaml", *options], directory, is_forked=is_forked)
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out[-3000:]
    return out


def use_path(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks find the modules in ``directory`` first."""
    found = RANK_ENVIRONMENT.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setitem(RANK_ENVIRONMENT, "PYTHONPATH", os.pathsep.join((str(directory), found)))


def test_a_run_of_another_packages_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_path(install_guest(tmp_path / "site"), monkeypatch)
    write_toys(tmp_path)
    raw: dict[str, Any] = copying(tmp_path, "guests", {"name": "guest", "prompts_per_step": 8}, [0.5, 0.5], 2)
    raw["models"]["actor"] |= {"engine": "guest"}
    out = run(tmp_path, {**raw, "reward": {"function": "guest"}, "loggers": [{"name": "guest"}]}, "--launcher", "guest")
    assert "a guest starts the ranks" in out
    assert [path.name for path in sorted(tmp_path.glob("engine-*"))] == ["engine-actor"]
    rows = (tmp_path / "runs" / "guests" / "guest.txt").read_text().splitlines()
    assert [line.split()[0] for line in rows] == ["0", "1"]


def test_a_run_needs_no_more_than_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placements are explicit, and apart from times all numbers are the same to the last bit."""
    write_toys(tmp_path)
    raw = copying(tmp_path, "whole", PPO, [1, 1, 0.5], 2)
    run(tmp_path, raw, is_forked=True)
    use_path(write_hook(tmp_path / "hook"), monkeypatch)
    run(tmp_path, {**raw, "name": "core"})
    whole, core = (
        [{name: row[name] for name in row.keys() - METRICS.times} for row in RunDirectory(path).metrics.read()]
        for path in (tmp_path / "runs" / "whole", tmp_path / "runs" / "core")
    )
    assert len(core) == 2 and core == whole
