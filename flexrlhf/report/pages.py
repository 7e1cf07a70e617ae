"""Reports of runs and pages of plans: from directories and plans to a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flexrlhf.api import OutputPath, Plan, UserError, bytes_text, one_line
from flexrlhf.guideline.simulation.inputs import check_profile
from flexrlhf.report.file_reader import without_surrogates
from flexrlhf.report.page import Page, Section, Table, is_own_page, render
from flexrlhf.report.reported_run import ReportedRun, plan_of_run, predict, predict_run
from flexrlhf.report.run_contents import CONFIG, METRICS_FILE, RunContents, read_contents
from flexrlhf.report.sections import plan_page, run_page


@dataclass(frozen=True)
class WrittenPage:
    """A page that was written.

    path:   of the file
    bytes:  its size
    notes:  sentences on missing parts
    """

    path: Path
    bytes: int
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """Lines for a terminal."""
        size = f"{self.path}: {bytes_text(self.bytes)}, opens in any browser without a network"
        return "\n".join((size, *self.notes))


def check_page_path(path: Path, option: str, inputs: Sequence[Path] = ()) -> None:
    """Raise UserError if a page could not be written at ``path``, or would replace a file of another kind."""
    OutputPath(path, option).check_file("report.html", is_own_page, inputs)


def write_report(directories: Sequence[Path], path: Path, profile: Path | None) -> WrittenPage:
    """Write the page of the runs in ``directories``. Raises UserError for one without a run."""
    check_page_path(path, "--output", [each / name for each in directories for name in (CONFIG, METRICS_FILE)])
    if profile is not None:
        check_profile(profile)
    runs = [_reported(contents, profile) for contents in _named_apart([read_contents(each) for each in directories])]
    return _write(path, "--output", run_page(runs, _now()), runs)


class PlanPage:
    """The page of a command's plans, ``--html``."""

    def __init__(self, path: Path, inputs: Sequence[Path] = ()) -> None:
        """Check ``path``. ``inputs``: files that it may not replace. Raises UserError."""
        check_page_path(path, "--html", inputs)
        self._path = path

    def write(self, plans: Sequence[Plan]) -> WrittenPage:
        """Write the page of ``plans``."""
        runs = []
        for plan in plans:
            prediction = predict(plan)
            contents = RunContents(plan.spec.directory, plan.spec.dump(), plan.spec, steps=plan.spec.steps)
            runs.append(ReportedRun(contents, plan, prediction))
        return _write(self._path, "--html", plan_page(runs, _now()), runs)


class TablesPage:
    """A page of tables, ``--html`` of a command."""

    def __init__(self, path: Path, such_as: str) -> None:
        """Check ``path``. ``such_as``: an example of a file name. Raises UserError."""
        OutputPath(path, "--html").check_file(such_as, is_own_page)
        self._path = path

    def write(self, title: str, sections: Iterable[Mapping[str, Any]], footer: str) -> None:
        """Write the page. ``sections``: fields of each ``Section``, whose tables are rows of cells below a head."""
        made = []
        for section in sections:
            tables = [Table(head, tuple(rows)) for head, *rows in section["tables"]]
            made.append(Section(**{**section, "tables": tuple(tables), "notes": tuple(section["notes"])}))
        OutputPath(self._path, "--html").write(render(Page(title, (), tuple(made), footer)))


def _named_apart(runs: Sequence[RunContents]) -> list[RunContents]:
    """Return the runs with different names: of their directories if the runs have the same."""
    for names in ([run.name for run in runs], [run.directory.absolute().name for run in runs]):
        if len(set(names)) == len(names):
            return [replace(run, alias=name) for run, name in zip(runs, names, strict=True)]
    paths = [str(run.directory.absolute()) for run in runs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"run {twice}: given twice; give each directory once")
    return [replace(run, alias=str(run.directory)) for run in runs]


def _reported(contents: RunContents, profile: Path | None) -> ReportedRun:
    plan, notes = plan_of_run(contents)
    prediction = "" if plan is None or notes else predict_run(plan, contents, profile)
    return ReportedRun(contents, plan, prediction, notes)


def _write(path: Path, option: str, page: Page, runs: Sequence[ReportedRun]) -> WrittenPage:
    text = without_surrogates(render(page))
    OutputPath(path, option).write(text)
    return WrittenPage(path, len(text.encode()), tuple(map(one_line, _notes(runs))))


def _notes(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Yield missing parts of each run; of predictions one line for all, because the page has their reasons."""
    yield from (f"{run.name}: {note}" for run in runs for note in run.notes)
    unpredicted = [run.name for run in runs if isinstance(run.prediction, str) and run.prediction]
    if unpredicted:
        yield f"no predicted timeline of {', '.join(unpredicted)}; the page says why, above its timelines"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
