"""Contents of a run's directory, as far as they are there: of a run that has ended, goes on, or failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flexrlhf.api import (
    OperatorKind,
    RunDirectory,
    Span,
    Spec,
    Trace,
    UserError,
    counted,
    load_spec,
    make_graph,
    nearest,
    one_line,
    shortened,
)
from flexrlhf.report.file_reader import DAMAGE, FileReader, LineFields, RowReader, read_json
from flexrlhf.report.metric_table import MetricTable
from flexrlhf.report.row_forms import CALLS_ROW, FACTS, FAILURE_RECORD, METRIC_ROW, REPLAN_ROW, SAMPLE_ROW

CONFIG, PLAN, METRICS_FILE = "config.yaml", "plan.txt", "metrics.jsonl"
SAMPLES, TRACE = "samples.jsonl", "timeline.json"
MOST_FAILURES = 8
"""Reasons of a failed run that are shown."""
MOST_OF_FAILURE, MOST_CHARACTERS = 2000, 1_000_000
"""Characters of a reason, and of a config, that are shown."""

ShownState = Literal["running", "stopped", "finished", "failed", "unknown"]


@dataclass(frozen=True)
class RunContents:
    """Files of a run, read as far as they are there.

    directory:  of the run
    yaml:       text of its config; empty if there is none
    spec:       the config, read; None if it is missing or is no config of this version
    state:      ``failed``: it neither ended nor goes on; ``unknown``: its status is missing or damaged
    next_step:  the first step that is not trained on
    steps:      steps of the whole run; None if nothing says it
    rows:       of its metrics
    samples:    of its responses, read in each pass
    spans:      instructions of its last steps, in seconds
    facts:      metadata of its timeline: device, memory usage
    failures:   reasons of ranks that failed, a sentence each
    notes:      sentences on what is missing
    alias:      name in the page, if the config's is another run's, too
    calls:      of a program in the last two steps
    replans:    decisions whether to go on under another placement
    damage:     the notes on damaged files
    """

    directory: Path
    yaml: str = ""
    spec: Spec | None = None
    state: ShownState = "unknown"
    next_step: int = 0
    steps: int | None = None
    rows: MetricTable = field(default_factory=MetricTable)
    samples: Iterable[LineFields] = ()
    spans: tuple[Span, ...] = ()
    facts: LineFields = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    alias: str = ""
    calls: tuple[LineFields, ...] = ()
    replans: tuple[LineFields, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run, or of its directory where its config is missing."""
        return self.alias or (self.directory.absolute().name if self.spec is None else self.spec.name)


def read_contents(directory: Path) -> RunContents:
    """Read the directory of a run. Raises UserError if there is no run in it."""
    check_run_directory(directory)
    files, run = FileReader(directory), RunDirectory(directory)
    yaml, spec = _read_config(files)
    rows = files.rows(METRICS_FILE, METRIC_ROW, MetricTable, MetricTable())
    none: Iterable[LineFields] = ()
    samples = files.rows(SAMPLES, SAMPLE_ROW, _checked, none)
    spans, facts = _read_timeline(files, run)
    state, next_step, steps = _progress(files, run, rows)
    calls = files.rows(run.calls.path.name, CALLS_ROW, _last_two, _NONE)
    replans = files.rows(run.replans.path.name, REPLAN_ROW, tuple, _NONE)
    failures = tuple(_failures(files, run)) if state == "failed" else ()
    if not rows:
        files.notes.append("no step has been recorded yet, so there are no curves")
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
        failures,
        tuple(files.notes),
        calls=calls,
        replans=replans,
        damage=tuple(files.damage),
    )


_NONE: tuple[LineFields, ...] = ()


def _last_two(file: RowReader) -> tuple[LineFields, ...]:
    return tuple(deque(file, maxlen=2))


def _checked(file: RowReader) -> Iterable[LineFields]:
    """Return ``file``, whose damaged rows have been counted."""
    deque(file, maxlen=0)
    return file


def check_run_directory(directory: Path) -> None:
    """Raise UserError if there is no run in ``directory``."""
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"run {directory}: a file; give the directory of the run, such as {directory.parent}")
        others = [str(each) for each in _runs_in(directory.parent)] or [str(each) for each in _runs_in(Path("runs"))]
        known = nearest(str(directory), others) or (f"; there are {', '.join(others[:4])}" if others else "")
        raise UserError(f"run {directory}: no such directory{known}")
    if not RunDirectory(directory).is_there:
        inside = [str(each) for each in _runs_in(directory)]
        hint = f"; give one of {', '.join(inside[:4])}" if inside else ""
        raise UserError(f"run {directory}: no run in it, neither {CONFIG} with status.json nor {METRICS_FILE}{hint}")


def _runs_in(directory: Path) -> list[Path]:
    return [each for each in sorted(directory.iterdir()) if RunDirectory(each).is_there] if directory.is_dir() else []


def _read_config(files: FileReader) -> tuple[str, Spec | None]:
    path = files.directory / CONFIG
    if not path.is_file():
        files.notes.append(f"{path} is missing, so there are neither settings nor a plan of this run")
        return "", None
    text = files.value(CONFIG, _text, "")
    try:
        return text, load_spec(path)
    except UserError as error:
        files.notes.append(f"the plan cannot be made again: {error}")
        return text, None


def _text(path: Path) -> str:
    """Return the start of a text; a config has a few kilobytes."""
    with path.open(errors="replace") as file:
        return file.read(MOST_CHARACTERS)


def _read_timeline(files: FileReader, run: RunDirectory) -> tuple[tuple[Span, ...], LineFields]:
    """Return the spans of a run and the metadata of its timeline: of its end, or of its logs until then."""
    # a run that goes on has the one of its last end
    if run.timeline.is_file() and not run.is_locked:
        found = files.value(TRACE, _read_trace, None)
        if found is not None:
            return found
    spans: list[Span] = []
    try:
        spans = run.flights.spans()
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        files.damaged(f"the logs in {run.path / 'timeline'} cannot be read ({reason})")
    sound = tuple(span for span in spans if span.is_sound)
    if len(sound) < len(spans):
        files.damaged(f"{counted(len(spans) - len(sound), 'damaged span')} in the logs of {files.directory}")
    if not spans:
        files.notes.append(f"there is no timeline: neither {TRACE}, nor logs in flight/ or timeline/")
    return sound, {}


def _read_trace(path: Path) -> tuple[tuple[Span, ...], LineFields]:
    trace = read_json(path.read_bytes())
    return tuple(Trace.of_json(trace).spans), FACTS.validate_python(trace["otherData"])


def _progress(files: FileReader, run: RunDirectory, rows: MetricTable) -> tuple[ShownState, int, int | None]:
    """Return state, first step that is not trained on, and number of steps."""
    recorded = rows.steps[-1] + 1 if rows else 0
    is_going_on = run.is_locked
    try:
        status = run.status
    except UserError as error:
        files.damaged(str(error))
        status = None
    if status is None:
        return "running" if is_going_on else "unknown", recorded, None
    state: ShownState = status.state
    if state == "running" and not is_going_on:
        state = "failed"
    return state, max(recorded, status.next_step), status.steps


def _failures(files: FileReader, run: RunDirectory) -> list[str]:
    """Return why ranks ended, the same reason once; that others ended them only where there is nothing else."""
    causes: dict[str, str] = {}
    consequences: dict[str, str] = {}
    for path in sorted(run.flights.records.glob("rank-*.json")):
        record = files.value(str(path.relative_to(run.path)), _read_failure, None)
        if record is None:
            continue
        reason, place = record["reason"], record.get("at") or ""
        named = reason if reason.startswith("rank ") else f"rank {record.get('rank')}: {reason}"
        found = consequences if run.flights.is_consequence(reason) else causes
        found.setdefault(reason, named if not place or place in reason else f"{named} (at {place})")
    return [shortened(each, MOST_OF_FAILURE) for each in [*(causes or consequences).values()][:MOST_FAILURES]]


def _read_failure(path: Path) -> LineFields | None:
    record: LineFields = FAILURE_RECORD.validate_python(read_json(path.read_bytes()))
    return record


@dataclass(frozen=True)
class RecordedSteps:
    """A run in its directory.

    name:    the directory, as the command line has it
    title:   the first line of its plan: algorithm, strategy, devices
    spec:    its resolved settings
    rows:    its metrics
    spans:   of its last steps, on all ranks
    kinds:   name of an operator → its kind
    damage:  sentences on damaged files
    """

    name: str
    title: str
    spec: Spec
    rows: MetricTable
    spans: tuple[Span, ...]
    kinds: Mapping[str, OperatorKind]
    damage: tuple[str, ...] = ()


def read_steps(directory: Path) -> RecordedSteps:
    """Return the run in ``directory``. Raises UserError if there is none, or one without settings or a step."""
    contents = read_contents(directory)
    if contents.spec is None:
        raise UserError(f"run {directory}: its {CONFIG} is missing or cannot be read ({'; '.join(contents.notes)})")
    if not contents.rows:
        raise UserError(f"run {directory}: no step in its {METRICS_FILE}; wait for the first one, or run it again")
    spec, graph = contents.spec, make_graph(contents.spec)
    lines = FileReader(directory).value(PLAN, _text, "").splitlines()
    return RecordedSteps(
        name=str(directory),
        title=one_line(lines[0]) if lines else f"{spec.name}: {spec.algorithm.name}",
        spec=spec,
        rows=contents.rows,
        spans=contents.spans,
        kinds={operator.name: operator.kind for operator in (*graph.operators, *graph.evaluation)},
        damage=contents.damage,
    )
