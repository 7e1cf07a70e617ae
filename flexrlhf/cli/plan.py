"""``flexrlhf plan``."""

from __future__ import annotations

import typer

from flexrlhf.cli.options import Configs, Devices, Force, Overrides, PlacementRatio
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_data_lines
from flexrlhf.cli.specs import load_specs
from flexrlhf.plan.inputs import check_present_data
from flexrlhf.plan.plan_text import format_plan


def plan(
    configs: Configs = None,
    placement_ratio: PlacementRatio = None,
    devices: Devices = None,
    set_: Overrides = None,
    force: Force = False,
) -> None:
    """Check data that exists, print placement, schedule, transfers and memory of each run; starts nothing."""
    plans = plan_runs(load_specs(configs, placement_ratio, devices, set_))
    if configs:
        for each in plans:
            check_present_data(each)
    files = inspect_data(plans) if configs else []
    for each in plans:
        typer.echo(format_plan(each) + "\n")
    print_data_lines(files)
    check_memory(plans, force)
