"""Record of a run for predictions that start from it, and the time that a restart of it takes."""

from __future__ import annotations

from pathlib import Path

from flexrlhf.api import DiskNeed, Plan, RunContents, RunDirectory, UserError, make_plan, read_contents
from flexrlhf.guideline.simulation.measured_run import MeasuredRun, RunRecord


def read_record(directory: Path, plan: Plan | None = None) -> RunRecord:
    """Return the record of the run in ``directory``. ``plan``: None: that of its config.

    Raises UserError if there is no run in it, or no plan can be made of its config.
    """
    contents = read_contents(directory)
    if contents.spec is None:
        raise UserError(f"run {directory}: {contents.notes[0]}")
    rows = [*contents.rows.rows(_needed(contents))]
    return RunRecord(directory, plan or make_plan(contents.spec), rows, contents.samples, contents.spans)


def _needed(contents: RunContents) -> list[int]:
    """Return the places of the first row, which tells the time of the start, and of those that have spans."""
    table, first = contents.rows, min((span.step for span in contents.spans), default=0)
    timed = {*table.series("seconds").steps}
    places = dict.fromkeys([*range(min(1, len(table))), *range(table.place(first), len(table))])
    return [place for place in places if table.steps[place] in timed]


def restart_seconds(run: MeasuredRun) -> float:
    """Return the time of a restart: the start as measured, writing and reading a checkpoint, and the time that a first
    step takes in addition. Raises UserError if the start was not measured."""
    directory, plan = run.record.directory, run.record.plan
    status = RunDirectory(directory).status
    if status is None or status.start_seconds is None:
        raise UserError(
            f"run {directory}: its status.json has no start_seconds, so that the time of a restart is not known; it is "
            f"of an older version"
        )
    copies = 2 * run.source.costs.save(DiskNeed.of(plan).checkpoint).seconds
    return status.start_seconds + copies + run.warm_up
