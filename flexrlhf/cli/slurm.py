"""``flexrlhf slurm``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import (
    ActorModelPath,
    ConfigOption,
    CriticModelPath,
    Devices,
    Force,
    Overrides,
    PlacementRatio,
    RunOptions,
    complete_config,
)
from flexrlhf.cli.planning import check_memory, plan_runs
from flexrlhf.config.user_paths import check_output
from flexrlhf.errors import UserError
from flexrlhf.plan.slurm_script import slurm_script

Config = Annotated[Path | None, typer.Argument(help="YAML file of the run", autocompletion=complete_config)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="file to write; without it the script is printed")]
Directive = Annotated[
    list[str] | None,
    typer.Option("--directive", metavar="KEY=VALUE", help="further option of sbatch, such as time=24:00:00"),
]
Seconds = Annotated[int, typer.Option(min=1, help="signal to save, so long before the time is up")]


def slurm(
    config: Config = None,
    config_option: ConfigOption = None,
    output: Output = None,
    actor_model_path: ActorModelPath = None,
    critic_model_path: CriticModelPath = None,
    placement_ratio: PlacementRatio = None,
    devices: Devices = None,
    set_: Overrides = None,
    directive: Directive = None,
    save_seconds: Seconds = 300,
    force: Force = False,
) -> None:
    """Write a batch script for SLURM.

    A task on each node of the plan, which saves and is requeued before its time.
    """
    paths = None if config is None else [config]
    run = RunOptions(paths, config_option, actor_model_path, critic_model_path, placement_ratio, devices, set_)
    if (config := run.only_path) is None:
        raise UserError("slurm: missing config; give the YAML file of the run")
    if output is not None:
        check_output(output, "--output", "job.sbatch", is_script, (config,))
    (plan,) = plan_runs(run.specs())
    check_memory([plan], force)
    given = [("--placement-ratio", placement_ratio), ("--devices", devices)]
    given += [("--set", setting) for setting in run.settings]
    words = [word for option, value in given if value is not None for word in (option, str(value))]
    command = shlex.join(["flexrlhf", "run", str(config), *words, "--resume", "auto"])
    text = slurm_script(plan, command, directive or (), save_seconds)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)
        typer.echo(f"wrote {output}; start it with: sbatch {output}")


def is_script(text: str) -> bool:
    """Return whether a file is one that this command may replace."""
    return text.startswith("#!") and "#SBATCH" in text
