"""``flexrlhf report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import Profile
from flexrlhf.cli.working import working
from flexrlhf.text import bytes_text

Runs = Annotated[list[Path], typer.Argument(help="directories of runs, such as runs/my-ppo; several are compared")]
Output = Annotated[Path, typer.Option("--output", "-o", help="file of the page")]


def report(runs: Runs, output: Output = Path("report.html"), profile: Profile = None) -> None:
    """Write one HTML page of runs.

    Curves, timeline, memory, samples and settings; also of runs that go on or failed.
    """
    from flexrlhf.report.command import write_report

    with working("reading runs"):
        written = write_report(runs, output, profile)
    typer.echo(f"{written.path}: {bytes_text(written.bytes)}, opens in any browser without a network")
    for note in written.notes:
        typer.echo(note)
