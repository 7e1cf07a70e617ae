"""``flexrlhf plan``."""

from __future__ import annotations

import typer

from flexrlhf.cli.options import (
    ActorModelPath,
    ConfigOption,
    Configs,
    CriticModelPath,
    Devices,
    Force,
    Overrides,
    PlacementRatio,
)
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_data_lines
from flexrlhf.cli.specs import chosen_configs, load_specs, with_model_paths
from flexrlhf.plan.inputs import check_present_data
from flexrlhf.plan.plan_text import format_plan


def plan(
    configs: Configs = None,
    config: ConfigOption = None,
    actor_model_path: ActorModelPath = None,
    critic_model_path: CriticModelPath = None,
    placement_ratio: PlacementRatio = None,
    devices: Devices = None,
    set_: Overrides = None,
    force: Force = False,
) -> None:
    """Print placement, schedule and memory of each run.

    Transfers and process groups, too. Data that exists is checked. Starts nothing.
    """
    paths = chosen_configs(configs, config)
    settings = with_model_paths(set_, actor_model_path, critic_model_path)
    plans = plan_runs(load_specs(paths, placement_ratio, devices, settings))
    if paths:
        for each in plans:
            check_present_data(each)
    files = inspect_data(plans) if paths else []
    for each in plans:
        typer.echo(format_plan(each) + "\n")
    print_data_lines(files)
    check_memory(plans, force)
