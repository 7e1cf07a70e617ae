"""``flexrlhf plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import Force, RunOptions, with_run_options
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_absent_data, print_data_lines
from flexrlhf.cli.working import working
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.config.user_paths import check_output
from flexrlhf.errors import UserError
from flexrlhf.plan.input_checks import check_present_data
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.text import bytes_text

Html = Annotated[
    Path | None,
    typer.Option(help="write a page with the placement, the predicted timeline and the memory to this file"),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="write the YAML with every setting, also those that are chosen or the default"),
]
WRITTEN = "# every setting of"


@with_run_options
def plan(runs: RunOptions, force: Force = False, html: Html = None, output: Output = None) -> None:
    """Print placement, schedule and memory of each run.

    Transfers and process groups, too. Data that exists is checked. Starts nothing.
    """
    paths = runs.paths
    if html is not None:
        from flexrlhf.report.command import check_page_path

        check_page_path(html, "--html", paths)
    if output is not None:
        check_output(output, "--output", "full.yaml", lambda text: text.startswith(WRITTEN), paths)
    plans = plan_runs(runs.specs())
    if output is not None and len(plans) > 1:
        raise UserError(f"--output: goes with one config, found {len(plans)}")
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
    if output is not None:
        output.write_text(f"{WRITTEN} {plans[0].spec.name}\n{dump_spec(plans[0].spec)}")
        typer.echo(f"written to {output}")


def _write_page(plans: Sequence[Plan], path: Path) -> None:
    from flexrlhf.report.command import write_plan_page

    with working(f"writing {path}"):
        written = write_plan_page(plans, path)
    typer.echo(f"{written.path}: {bytes_text(written.bytes)}, opens in any browser without a network")
    for note in written.notes:
        typer.echo(note)
