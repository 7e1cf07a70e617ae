"""``flexrlhf export``: a model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.config.model_settings import SavedDtype

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
    from flexrlhf.runs.export import TrainedModel

    found = TrainedModel.find(run, model)
    found.export(output, merge_adapters, dtype, force)
    typer.echo(f"{found.role} of {found.origin} written to {output}")
