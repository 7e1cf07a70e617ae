"""A run as its directory has it: its settings, the metrics of its steps and its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.execution.run_directory import read_lines
from flexrlhf.operators.graph import OperatorKind
from flexrlhf.operators.registry import make_graph
from flexrlhf.timeline import Span, read_trace

CONFIG, METRICS, PLAN, TIMELINE = "config.yaml", "metrics.jsonl", "plan.txt", "timeline.json"


@dataclass(frozen=True)
class RecordedSteps:
    """A run in its directory.

    name:    the directory, as the command line has it
    title:   the first line of its plan: algorithm, strategy, devices
    spec:    its resolved settings
    rows:    step → its metrics
    spans:   of its last steps, on all ranks; none while it goes on
    kinds:   name of an operator → what it computes
    """

    name: str
    title: str
    spec: Spec
    rows: Mapping[int, Mapping[str, Any]]
    spans: tuple[Span, ...]
    kinds: Mapping[str, OperatorKind]


def read_steps(directory: Path) -> RecordedSteps:
    """Return the run in ``directory``. Raises UserError where there is none, or one without a step."""
    if not (directory / CONFIG).is_file():
        others = [str(path.parent) for path in directory.parent.glob(f"*/{CONFIG}")]
        raise UserError(f"{directory}: no run in it (no {CONFIG}){nearest(str(directory), others)}")
    spec = load_spec(directory / CONFIG)
    try:
        rows = {row["step"]: row for row in read_lines(directory / METRICS)}
        spans = tuple(read_trace(directory / TIMELINE)) if (directory / TIMELINE).is_file() else ()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: {METRICS} or {TIMELINE} cannot be read ({error}); run it again") from None
    if not rows:
        raise UserError(f"{directory}: no step in its {METRICS}; wait for the first one, or run it again")
    graph = make_graph(spec)
    kinds = {operator.name: operator.kind for operator in (*graph.operators, *graph.evaluation)}
    return RecordedSteps(str(directory), _title(directory, spec), spec, rows, spans, kinds)


def _title(directory: Path, spec: Spec) -> str:
    path = directory / PLAN
    lines = path.read_text().splitlines() if path.is_file() else []
    return lines[0] if lines else f"{spec.name}: {spec.algorithm.name}"
