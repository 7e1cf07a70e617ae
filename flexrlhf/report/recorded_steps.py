"""A run as its directory has it: its settings, the metrics of its steps and its timeline, also while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import OperatorKind
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.report.run_contents import CONFIG, METRICS, RunContents, read_contents
from flexrlhf.timeline import Span

PLAN = "plan.txt"


@dataclass(frozen=True)
class RecordedSteps:
    """A run in its directory.

    name:    the directory, as the command line has it
    title:   the first line of its plan: algorithm, strategy, devices
    spec:    its resolved settings
    rows:    step → its metrics
    spans:   of its last steps, on all ranks
    kinds:   name of an operator → what it computes
    """

    name: str
    title: str
    spec: Spec
    rows: Mapping[int, Mapping[str, Any]]
    spans: tuple[Span, ...]
    kinds: Mapping[str, OperatorKind]


def read_steps(directory: Path) -> RecordedSteps:
    """Return the run in ``directory``. Raises UserError where there is none, or one without settings or a step."""
    contents = read_contents(directory)
    if contents.spec is None:
        raise UserError(f"run {directory}: its {CONFIG} is missing or cannot be read ({'; '.join(contents.notes)})")
    if not contents.rows:
        raise UserError(f"run {directory}: no step in its {METRICS}; wait for the first one, or run it again")
    return _steps(contents, contents.spec)


def _steps(contents: RunContents, spec: Spec) -> RecordedSteps:
    graph = make_graph(spec)
    return RecordedSteps(
        name=str(contents.directory),
        title=_title(contents.directory, spec),
        spec=spec,
        rows={row["step"]: row for row in contents.rows},
        spans=contents.spans,
        kinds={operator.name: operator.kind for operator in (*graph.operators, *graph.evaluation)},
    )


def _title(directory: Path, spec: Spec) -> str:
    path = directory / PLAN
    lines = path.read_text().splitlines() if path.is_file() else []
    return lines[0] if lines else f"{spec.name}: {spec.algorithm.name}"
