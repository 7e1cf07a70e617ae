"""``flexrlhf slurm``: the batch script of a plan, which saves before its time is up and is requeued."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import groupby
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
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.config.output_path import OutputPath
from flexrlhf.errors import UserError, one_line, shown
from flexrlhf.placement.cluster import Cluster
from flexrlhf.plan.plan import Plan

STOPPED, UNSTARTED = 143, 138
"""Exit codes of a run that has saved, or that has not begun, and ended on a signal; and of one that SIGUSR1 reached
before its interpreter ran."""
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
        OutputPath(output, "--output").check_file(
            "job.sbatch", lambda text: text.startswith("#!") and "#SBATCH" in text, (config,)
        )
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
        typer.echo(f"wrote {output}; start it with: sbatch {shlex.quote(str(output))}")


def slurm_script(plan: Plan, command: str, directives: Sequence[str] = (), seconds: int = 300) -> str:
    """Return the batch script of ``plan``.

    command:     ``flexrlhf run`` with its arguments.
    directives:  further options of sbatch, such as ``time=24:00:00``, for every component.
    seconds:     between the signal and the end of the job's time.
    """
    groups = node_groups(plan.cluster)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={plan.spec.name}"]
    lines += [f"#SBATCH --{line}" for line in (f"signal=USR1@{seconds}", "requeue", "open-mode=append")]
    directives = [_directive(each) for each in directives]
    per_node = "cpus-per-task" if plan.spec.cluster.device == "cpu" else "gpus-per-node"
    for index, (count, devices, device_class) in enumerate(groups):
        lines += ["#SBATCH hetjob"] * (index > 0)
        lines += [f"# {count} x {devices} {one_line(device_class)}", f"#SBATCH --nodes={count}"]
        # a task starts all ranks of its node
        lines += ["#SBATCH --ntasks-per-node=1", f"#SBATCH --{per_node}={devices}"]
        lines += [f"#SBATCH --{directive}" for directive in directives]
    parts = "" if len(groups) == 1 else f" --het-group=0-{len(groups) - 1}"
    return (
        "\n".join(lines)
        + f"""

# for all tasks: machines that do not mount each other's runs copy files with it
export {JobSecret.VARIABLE}="${{{JobSecret.VARIABLE}:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}}"
srun{parts} {command}
code=$?
if [ $code -eq {STOPPED} ] || [ $code -eq {UNSTARTED} ]; then
    # ended on a signal: the next job goes on from what is saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
    )


def _directive(text: str) -> str:
    """Return an option of sbatch as a line of the script may have it. Raises UserError unless it is one."""
    name, equals, value = text.partition("=")
    if not text.isprintable() or re.fullmatch(r"[A-Za-z][\w-]*", name) is None:
        raise UserError(f"--directive {shown(text)}: expected one option of sbatch, KEY=VALUE, such as time=24:00:00")
    return f"{name}{equals}{shlex.quote(value) if value else ''}"


def node_groups(cluster: Cluster) -> list[tuple[int, int, str]]:
    """Return number, devices and device class of equal nodes next to each other, the components of a job."""
    nodes = [cluster.ranks_on_node(node) for node in range(cluster.num_nodes)]
    kinds = groupby((len(ranks), cluster.devices[ranks[0]].device_class) for ranks in nodes)
    return [(len(list(same)), devices, device_class) for (devices, device_class), same in kinds]
