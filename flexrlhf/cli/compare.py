"""``flexrlhf compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.errors import UserError

Runs = Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="directories of runs, such as runs/NAME")]
All = Annotated[bool, typer.Option("--all", help="list all metrics, not the main ones and those that differ alone")]


def compare(runs: Runs, all_: All = False) -> None:
    """Show runs side by side.

    How far their metrics differ, and where the time of a step goes.
    """
    from flexrlhf.report.comparison import format_runs
    from flexrlhf.report.recorded_steps import read_steps

    if len(runs) < 2:
        raise UserError(f"compare: expected two runs or more, found {runs[0]} alone; give another run's directory")
    typer.echo(format_runs([read_steps(run) for run in runs], all_))
