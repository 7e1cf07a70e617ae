"""``flexrlhf plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

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
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_absent_data, print_data_lines
from flexrlhf.cli.specs import chosen_configs, load_specs, with_model_paths
from flexrlhf.cli.working import working
from flexrlhf.plan.inputs import check_present_data
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.text import bytes_text

Html = Annotated[
    Path | None,
    typer.Option(help="write a page with the placement, the predicted timeline and the memory to this file"),
]


def plan(
    configs: Configs = None,
    config: ConfigOption = None,
    actor_model_path: ActorModelPath = None,
    critic_model_path: CriticModelPath = None,
    placement_ratio: PlacementRatio = None,
    devices: Devices = None,
    set_: Overrides = None,
    force: Force = False,
    html: Html = None,
) -> None:
    """Print placement, schedule and memory of each run.

    Transfers and process groups, too. Data that exists is checked. Starts nothing.
    """
    paths = chosen_configs(configs, config)
    settings = with_model_paths(set_, actor_model_path, critic_model_path)
    if html is not None:
        from flexrlhf.report.command import check_page_path

        check_page_path(html, "--html", paths or ())
    plans = plan_runs(load_specs(paths, placement_ratio, devices, settings))
    if paths:
        for each in plans:
            check_present_data(each)
    files = inspect_data(plans) if paths else []
    for each in plans:
        typer.echo(format_plan(each) + "\n")
    print_data_lines(files)
    if paths:
        print_absent_data(plans)
    if html is not None:
        _write_page(plans, html)
    check_memory(plans, force)


def _write_page(plans: Sequence[Plan], path: Path) -> None:
    from flexrlhf.report.command import write_plan_page

    with working(f"writing {path}"):
        written = write_plan_page(plans, path)
    typer.echo(f"{written.path}: {bytes_text(written.bytes)}, opens in any browser without a network")
    for note in written.notes:
        typer.echo(note)
