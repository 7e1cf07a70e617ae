"""The directory of a run, ``runs/<name>/``: resolved YAML, plan, metrics, samples, timeline and models."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from flexrlhf.config.spec_file import dump_spec
from flexrlhf.plan.plan import Plan


def prepare_directory(plan: Plan, plan_text: str) -> None:
    """Make the run's directory with config and plan. An existing one is renamed to ``<name>.1``, ``<name>.2`` …"""
    directory = plan.spec.directory
    if directory.exists():
        directory.rename(_free_name(directory))
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_spec(plan.spec))
    (directory / "plan.txt").write_text(plan_text + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a jsonl file; none when the run did not write it."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_facts(path: Path) -> dict[str, Any]:
    """Return the metadata of a timeline: everything but its spans."""
    facts: dict[str, Any] = json.loads(path.read_text())["otherData"]
    return facts


def _free_name(directory: Path) -> Path:
    names = (directory.with_name(f"{directory.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())
