"""What a run leaves in ``runs/<name>/``: the resolved YAML, the plan, metrics, samples, the timeline and the models."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from flexrlhf.config.spec_file import dump_spec
from flexrlhf.plan.plan import Plan


def prepare_directory(plan: Plan, plan_text: str) -> None:
    """Make the run's directory. One of an earlier run is kept beside it as ``<name>.1``, ``<name>.2`` …"""
    directory = plan.spec.directory
    if directory.exists():
        directory.rename(_free_name(directory))
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_spec(plan.spec))
    (directory / "plan.txt").write_text(plan_text + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a jsonl file; none when the run did not write it."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_facts(path: Path) -> dict[str, Any]:
    """What a timeline says beside its spans."""
    facts: dict[str, Any] = json.loads(path.read_text())["otherData"]
    return facts


def _free_name(directory: Path) -> Path:
    names = (directory.with_name(f"{directory.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())
