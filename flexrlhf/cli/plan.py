"""``flexrlhf plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.errors import print_error
from flexrlhf.cli.options import Configs, Devices, Force, Overrides, PlacementRatio
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_data_lines
from flexrlhf.cli.specs import load_specs
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
    placement_ratio: PlacementRatio = None,
    devices: Devices = None,
    set_: Overrides = None,
    force: Force = False,
    html: Html = None,
) -> None:
    """Check data that exists, print placement, schedule, transfers and memory of each run; starts nothing."""
    if html is not None:
        from flexrlhf.report.command import check_page_path

        check_page_path(html, "--html", configs or ())
    plans = plan_runs(load_specs(configs, placement_ratio, devices, set_))
    if configs:
        for each in plans:
            check_present_data(each)
    files = inspect_data(plans) if configs else []
    for each in plans:
        typer.echo(format_plan(each) + "\n")
    print_data_lines(files)
    if html is not None:
        _write_page(plans, html)
    check_memory(plans, force)


def _write_page(plans: Sequence[Plan], path: Path) -> None:
    from flexrlhf.report.command import write_plan_page

    written = write_plan_page(plans, path)
    typer.echo(f"{written.path}: {bytes_text(written.bytes)}, opens in any browser without a network")
    for note in written.notes:
        print_error(note)
