"""What a run leaves: ``runs/<name>/`` with the resolved YAML, the plan, metrics.jsonl, timeline.json and the models."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from flexrlhf.plan import Plan
from flexrlhf.spec_file import dump_spec


def prepare_directory(plan: Plan, plan_text: str) -> None:
    """Make the run's directory. One of an earlier run is kept beside it as ``<name>.1``, ``<name>.2`` …"""
    directory = plan.spec.directory
    if directory.exists():
        directory.rename(_free_name(directory))
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_spec(plan.spec))
    (directory / "plan.txt").write_text(plan_text + "\n")


def _free_name(directory: Path) -> Path:
    names = (directory.with_name(f"{directory.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())
