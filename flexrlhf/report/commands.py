"""``flexrlhf report`` and ``compare``: a page or a table of the directories of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.api import UserError, working
from flexrlhf.guideline.commands.basis import Profile

PageRuns = Annotated[list[Path], typer.Argument(help="directories of runs, such as runs/my-ppo; several are compared")]
Page = Annotated[Path, typer.Option("--output", "-o", help="file of the page")]
ComparedRuns = Annotated[
    list[Path], typer.Argument(metavar="RUN RUN...", help="directories of runs, such as runs/NAME")
]
All = Annotated[bool, typer.Option("--all", help="list all metrics, not the main ones and those that differ alone")]


def report(runs: PageRuns, output: Page = Path("report.html"), profile: Profile = None) -> None:
    """Write one HTML page of runs.

    Curves, timeline, memory, samples and settings; also of runs that go on or failed.
    """
    from flexrlhf.report.pages import write_report

    with working("reading runs"):
        written = write_report(runs, output, profile)
    typer.echo(written.text)


def compare(runs: ComparedRuns, all_: All = False) -> None:
    """Show runs side by side.

    How far their metrics differ, and where the time of a step goes.
    """
    from flexrlhf.report.run_contents import read_steps
    from flexrlhf.report.side_by_side import format_runs

    if len(runs) < 2:
        raise UserError(f"compare: expected two runs or more, found {runs[0]} alone; give another run's directory")
    typer.echo(format_runs([read_steps(run) for run in runs], all_))
