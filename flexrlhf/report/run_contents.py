"""Contents of a run's directory, as far as they are there: of a run that has ended, goes on, or failed."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import load_spec
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.graph import OperatorKind
from flexrlhf.plan.algorithm_graph import make_graph
from flexrlhf.runs.flight_log import ENDED, FAILURE, FLIGHT, TERMINATED, TIMELINE, logged_spans
from flexrlhf.runs.run_directory import LOCK, STATUS, read_status
from flexrlhf.text import counted
from flexrlhf.timeline import Span, read_trace

CONFIG, PLAN, METRICS, SAMPLES, TRACE = "config.yaml", "plan.txt", "metrics.jsonl", "samples.jsonl", "timeline.json"
REPLANS = "replans.jsonl"
"""Decisions of a run whether to go on under another placement."""
MOST_FAILURES = 8
"""Reasons of a failed run that are shown."""

RunState = Literal["running", "stopped", "finished", "failed", "unknown"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunContents:
    """Files of a run, read as far as they are there.

    directory:  of the run
    yaml:       text of its config; empty if there is none
    spec:       the config, read; None if it is missing or is no config of this version
    state:      ``failed``: it neither ended nor goes on; ``unknown``: its status is missing or damaged
    next_step:  the first step that is not trained on
    steps:      steps of the whole run; None if nothing says it
    rows:       of its metrics, one a step
    samples:    of its responses
    spans:      instructions of its last steps, in seconds
    facts:      metadata of its timeline: device, memory usage
    failures:   reasons of ranks that failed, a sentence each
    notes:      sentences on what is missing
    alias:      name in the page, if the config's is another run's, too
    replans:    decisions whether to go on under another placement
    """

    directory: Path
    yaml: str = ""
    spec: Spec | None = None
    state: RunState = "unknown"
    next_step: int = 0
    steps: int | None = None
    rows: tuple[Row, ...] = ()
    samples: tuple[Row, ...] = ()
    spans: tuple[Span, ...] = ()
    facts: Row = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alias: str = ""
    replans: tuple[Row, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run, or of its directory where its config is missing."""
        return self.alias or (self.directory.absolute().name if self.spec is None else self.spec.name)


def read_contents(directory: Path) -> RunContents:
    """Read the directory of a run. Raises UserError if there is no run in it."""
    check_run_directory(directory)
    notes: list[str] = []
    yaml, spec = _read_config(directory, notes)
    # of a step that was repeated, the last one
    by_step = {row["step"]: row for row in _read_rows(directory / METRICS, notes)}
    rows = tuple(by_step[step] for step in sorted(by_step))
    samples = tuple(_read_rows(directory / SAMPLES, notes))
    spans, facts = _read_timeline(directory, notes)
    state, next_step, steps = _progress(directory, rows, notes)
    if not rows:
        notes.append("no step has been recorded yet, so there are no curves")
    return RunContents(
        directory,
        yaml,
        spec,
        state,
        next_step,
        steps if steps is not None or spec is None else spec.steps,
        rows,
        samples,
        spans,
        facts,
        tuple(_failures(directory)) if state == "failed" else (),
        tuple(notes),
        replans=tuple(_read_rows(directory / REPLANS, notes)),
    )


def check_run_directory(directory: Path) -> None:
    """Raise UserError if there is no run in ``directory``."""
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"run {directory}: a file; give the directory of the run, such as {directory.parent}")
        others = [str(each) for each in _runs_in(directory.parent)] or [str(each) for each in _runs_in(Path("runs"))]
        known = nearest(str(directory), others) or (f"; there are {', '.join(others[:4])}" if others else "")
        raise UserError(f"run {directory}: no such directory{known}")
    if not _is_run(directory):
        inside = [str(each) for each in _runs_in(directory)]
        hint = f"; give one of {', '.join(inside[:4])}" if inside else ""
        raise UserError(f"run {directory}: no run in it, neither {CONFIG} with {STATUS} nor {METRICS}{hint}")


def _is_run(directory: Path) -> bool:
    return (directory / METRICS).is_file() or ((directory / CONFIG).is_file() and (directory / STATUS).is_file())


def _runs_in(directory: Path) -> list[Path]:
    return [each for each in sorted(directory.iterdir()) if _is_run(each)] if directory.is_dir() else []


def _read_config(directory: Path, notes: list[str]) -> tuple[str, Spec | None]:
    path = directory / CONFIG
    if not path.is_file():
        notes.append(f"{path} is missing, so there are neither settings nor a plan of this run")
        return "", None
    text = path.read_text(errors="replace")
    try:
        return text, load_spec(path)
    except UserError as error:
        notes.append(f"the plan cannot be made again: {error}")
        return text, None


def _read_rows(path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the rows of a jsonl file; a last line that is being written is left out, and so are damaged ones."""
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    damaged = 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            damaged += number < len(lines)
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
        else:
            damaged += 1
    if damaged:
        notes.append(f"{counted(damaged, 'damaged line')} of {path} {'is' if damaged == 1 else 'are'} left out")


def _read_timeline(directory: Path, notes: list[str]) -> tuple[tuple[Span, ...], Row]:
    """Return the spans of a run and the metadata of its timeline: of its end, or of its logs until then."""
    path = directory / TRACE
    # a run that goes on has the one of its last end
    if path.is_file() and not is_in_use(directory):
        try:
            facts = json.loads(path.read_text())["otherData"]
            return tuple(read_trace(path)), dict(facts)
        except (ValueError, KeyError, TypeError) as error:
            notes.append(f"{path} cannot be read ({type(error).__name__}: {error})")
    try:
        spans = logged_spans(directory)
    except (ValueError, KeyError, TypeError, OSError) as error:
        notes.append(f"the logs in {directory / TIMELINE} cannot be read ({type(error).__name__}: {error})")
        return (), {}
    if not spans:
        notes.append(f"there is no timeline: neither {TRACE}, nor logs in {FLIGHT}/ or {TIMELINE}/")
    return tuple(spans), {}


def _progress(directory: Path, rows: tuple[Row, ...], notes: list[str]) -> tuple[RunState, int, int | None]:
    """Return state, first step that is not trained on, and number of steps."""
    recorded = rows[-1]["step"] + 1 if rows else 0
    try:
        status = read_status(directory)
    except UserError as error:
        notes.append(str(error))
        status = None
    if status is None:
        return "running" if is_in_use(directory) else "unknown", recorded, None
    state: RunState = status.state
    if state == "running" and not is_in_use(directory):
        state = "failed"
    return state, max(recorded, status.next_step), status.steps


def is_in_use(directory: Path) -> bool:
    """Whether a process has locked the directory of a run."""
    path = directory / LOCK
    if not path.is_file():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _failures(directory: Path) -> list[str]:
    """Return why ranks ended, the same reason once; that others ended them only where there is nothing else."""
    causes: dict[str, str] = {}
    consequences: dict[str, str] = {}
    for path in sorted((directory / FAILURE).glob("rank-*.json")):
        try:
            record = json.loads(path.read_text())
            reason, place = str(record["reason"]), str(record.get("at") or "")
        except (ValueError, KeyError, TypeError, OSError):
            continue
        named = reason if reason.startswith("rank ") else f"rank {record.get('rank')}: {reason}"
        found = consequences if reason in (ENDED, TERMINATED) else causes
        found.setdefault(reason, named if not place or place in reason else f"{named} (at {place})")
    return [*(causes or consequences).values()][:MOST_FAILURES]


@dataclass(frozen=True)
class RecordedSteps:
    """A run in its directory.

    name:    the directory, as the command line has it
    title:   the first line of its plan: algorithm, strategy, devices
    spec:    its resolved settings
    rows:    step → its metrics
    spans:   of its last steps, on all ranks
    kinds:   name of an operator → its kind
    """

    name: str
    title: str
    spec: Spec
    rows: Mapping[int, Mapping[str, Any]]
    spans: tuple[Span, ...]
    kinds: Mapping[str, OperatorKind]


def read_steps(directory: Path) -> RecordedSteps:
    """Return the run in ``directory``. Raises UserError if there is none, or one without settings or a step."""
    contents = read_contents(directory)
    if contents.spec is None:
        raise UserError(f"run {directory}: its {CONFIG} is missing or cannot be read ({'; '.join(contents.notes)})")
    if not contents.rows:
        raise UserError(f"run {directory}: no step in its {METRICS}; wait for the first one, or run it again")
    spec, path, graph = contents.spec, directory / PLAN, make_graph(contents.spec)
    lines = path.read_text().splitlines() if path.is_file() else []
    return RecordedSteps(
        name=str(directory),
        title=lines[0] if lines else f"{spec.name}: {spec.algorithm.name}",
        spec=spec,
        rows={row["step"]: row for row in contents.rows},
        spans=contents.spans,
        kinds={operator.name: operator.kind for operator in (*graph.operators, *graph.evaluation)},
    )
