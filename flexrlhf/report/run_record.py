"""Record of a run for predictions that start from it."""

from __future__ import annotations

from pathlib import Path

from flexrlhf.api import Plan, UserError, make_plan
from flexrlhf.guideline.simulation.measured_run import RunRecord
from flexrlhf.report.run_contents import RunContents, read_contents


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
