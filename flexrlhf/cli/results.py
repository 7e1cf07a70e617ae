"""``flexrlhf report``, ``compare`` and ``export``: a page, a table or a model of the directories of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import Profile
from flexrlhf.cli.working import working
from flexrlhf.config.model_settings import SavedDtype
from flexrlhf.errors import UserError
from flexrlhf.text import bytes_text

PageRuns = Annotated[list[Path], typer.Argument(help="directories of runs, such as runs/my-ppo; several are compared")]
Page = Annotated[Path, typer.Option("--output", "-o", help="file of the page")]
ComparedRuns = Annotated[
    list[Path], typer.Argument(metavar="RUN RUN...", help="directories of runs, such as runs/NAME")
]
All = Annotated[bool, typer.Option("--all", help="list all metrics, not the main ones and those that differ alone")]
TrainedRun = Annotated[Path, typer.Argument(help="directory of a run, such as runs/NAME, or of one of its checkpoints")]
ModelDirectory = Annotated[
    Path, typer.Option("--output", "-o", help="directory to write; without --force it must not exist")
]
Model = Annotated[str | None, typer.Option("--model", help="trained model; default: the actor, or the only one")]
MergeAdapters = Annotated[
    bool, typer.Option("--merge-adapters", help="add adapters to the base weights; otherwise they are written alone")
]
Type = Annotated[SavedDtype, typer.Option("--dtype", help="type of the weights; auto: that in which a run saves it")]
Replace = Annotated[bool, typer.Option("--force", help="replace a model that the directory has")]


def report(runs: PageRuns, output: Page = Path("report.html"), profile: Profile = None) -> None:
    """Write one HTML page of runs.

    Curves, timeline, memory, samples and settings; also of runs that go on or failed.
    """
    from flexrlhf.report.command import write_report

    with working("reading runs"):
        written = write_report(runs, output, profile)
    typer.echo(f"{written.path}: {bytes_text(written.bytes)}, opens in any browser without a network")
    for note in written.notes:
        typer.echo(note)


def compare(runs: ComparedRuns, all_: All = False) -> None:
    """Show runs side by side.

    How far their metrics differ, and where the time of a step goes.
    """
    from flexrlhf.report.run_contents import read_steps
    from flexrlhf.report.side_by_side import format_runs

    if len(runs) < 2:
        raise UserError(f"compare: expected two runs or more, found {runs[0]} alone; give another run's directory")
    typer.echo(format_runs([read_steps(run) for run in runs], all_))


def export(
    run: TrainedRun,
    output: ModelDirectory,
    model: Model = None,
    merge_adapters: MergeAdapters = False,
    dtype: Type = "auto",
    force: Replace = False,
) -> None:
    """Write a model of a checkpoint as a Hugging Face directory.

    Of the newest one of a run, or of a checkpoint.
    """
    from flexrlhf.runs.export import export_model, find_trained_model

    found = find_trained_model(run, model)
    export_model(found, output, merge_adapters, dtype, force)
    typer.echo(f"{found.role} of {found.origin} written to {output}")
