"""Runs of ``flexrlhf run`` in a working directory, and their results."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.stages import Stage
from flexrlhf.runs.recorded_columns import RecordedColumn, RecordedColumns
from flexrlhf.verify.deviations import IN_NATS, NOT_COMPARED

CONFIGS = Path(__file__).parents[2] / "configs" / "real"
OTHER = "-other-placement"


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    name:       of the run
    placement:  as printed
    seconds:    of the whole command
    metrics:    of each step
    columns:    of the first step, by name
    """

    name: str
    placement: str
    seconds: float
    metrics: Sequence[dict[str, Any]]
    columns: Mapping[str, RecordedColumn]


def run_stage(stage: Stage, work: Path) -> tuple[Outcome, Outcome]:
    """Train under both placements. Of the second run no models are kept."""
    first = _run(stage.name, stage, (), work)
    second = _run(stage.name + OTHER, stage, (f"placement={stage.against}",), work)
    for model in (work / second.name).glob("*/model.safetensors"):
        shutil.rmtree(model.parent)
    return first, second


def _run(name: str, stage: Stage, changes: Sequence[str], work: Path) -> Outcome:
    """Run in the directory ``work``, to which the configs' paths are relative; ends as the command does."""
    shutil.rmtree(work / name, ignore_errors=True)
    settings = (f"name={name}", "debug.record_columns=true", *stage.changes, *changes)
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "flexrlhf", "run", str(CONFIGS / f"{stage.name}.yaml"), *words]
    begin = time.monotonic()
    code = subprocess.run(command, cwd=work).returncode
    if code:
        sys.exit(code)
    seconds = time.monotonic() - begin
    lines = (work / name / "metrics.jsonl").read_text().splitlines()
    placement = changes[0].partition("=")[2] if changes else "every model on both ranks"
    return Outcome(name, placement, seconds, [json.loads(line) for line in lines], RecordedColumns(work / name).read(0))


def equal_columns(first: Outcome, second: Outcome) -> str:
    """Return how many columns of the first step are equal in both runs to the last bit, and the names of others.

    Empty for runs that write none.
    """
    both = sorted(first.columns.keys() & second.columns.keys())
    if not both:
        return ""
    others = [name for name in both if not _are_equal(first.columns[name], second.columns[name])]
    return f"{len(both) - len(others)} of {len(both)}" + (f", not {', '.join(others)}" if others else "")


def _are_equal(one: RecordedColumn, two: RecordedColumn) -> bool:
    rows = sorted(one.values)
    return rows == sorted(two.values) and torch.equal(one.of_rows(rows), two.of_rows(rows))


def largest_difference(first: Outcome, second: Outcome) -> tuple[float, str]:
    """Return the largest difference of a metric between two runs and its name.

    Relative to the metric's root mean square over the steps, or to 1 nat for differences of log-probs.
    """
    names = {name for step in first.metrics for name in step} - NOT_COMPARED
    return max((_difference(name, first, second), name) for name in sorted(names))


def _difference(name: str, first: Outcome, second: Outcome) -> float:
    steps = [each for each in zip(first.metrics, second.metrics, strict=True) if name in each[0]]
    pairs = [(float(one[name]), float(two[name])) for one, two in steps]
    scale = math.sqrt(sum(one * one for one, _ in pairs) / len(pairs))
    least = 1.0 if name in IN_NATS else 1e-6
    return max(abs(one - two) for one, two in pairs) / max(scale, least)
