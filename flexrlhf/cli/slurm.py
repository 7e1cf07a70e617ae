"""``flexrlhf slurm``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.completion import complete_config
from flexrlhf.cli.options import (
    ActorModelPath,
    ConfigOption,
    CriticModelPath,
    Devices,
    Force,
    Overrides,
    PlacementRatio,
)
from flexrlhf.cli.planning import check_memory, plan_runs
from flexrlhf.cli.specs import chosen_config, load_specs, with_model_paths
from flexrlhf.config.output_path import check_output
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
    config = chosen_config(config, config_option)
    if config is None:
        raise UserError("slurm: missing config; give the YAML file of the run")
    settings = with_model_paths(set_, actor_model_path, critic_model_path)
    if output is not None:
        check_output(output, "--output", "job.sbatch", is_script, (config,))
    (spec,) = load_specs([config], placement_ratio, devices, settings)
    (plan,) = plan_runs([spec])
    check_memory([plan], force)
    given = [("--placement-ratio", placement_ratio), ("--devices", devices), *(("--set", each) for each in settings)]
    options = [word for name, value in given if value is not None for word in (name, str(value))]
    command = shlex.join(["flexrlhf", "run", str(config), *options, "--resume", "auto"])
    text = slurm_script(plan, command, directive or (), save_seconds)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text)
        typer.echo(f"wrote {output}; start it with: sbatch {output}")


def is_script(text: str) -> bool:
    """Return whether a file is one that this command may replace."""
    return text.startswith("#!") and "#SBATCH" in text
