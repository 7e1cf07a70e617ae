"""Plans of a command's runs, with their memory checked."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flexrlhf.cli.errors import print_error
from flexrlhf.cli.working import working
from flexrlhf.config.spec import Spec
from flexrlhf.data.files import is_present
from flexrlhf.errors import UserError
from flexrlhf.plan.choice import planned
from flexrlhf.plan.data_report import DataReport
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import check_fits


def plan_runs(specs: Sequence[Spec]) -> list[Plan]:
    """Plan the runs of a command; prints the settings that are chosen because their YAMLs leave them out."""
    with working("planning"):
        found = planned(specs)
    for _, text in found:
        if text:
            typer.echo(text + "\n")
    return [plan for plan, _ in found]


def check_memory(plans: Sequence[Plan], force: bool) -> None:
    """Raise UserError for a plan that exceeds the memory of its devices; with ``force`` print the sentence instead."""
    for plan in plans:
        try:
            check_fits(plan)
        except UserError as error:
            if not force:
                raise
            print_error(f"{error} (--force: continuing)")


def inspect_data(plans: Sequence[Plan]) -> list[tuple[str, DataReport]]:
    """Inspect the data files of ``plans`` that exist. Raises UserError for one with which ``run`` would stop.

    Returns the name of the run, and the report, of each.
    """
    return [
        (plan.spec.name, DataReport(source, found.counts))
        for index, plan in enumerate(plans)
        for source, found in plan.data.inspections(plans[:index])
    ]


def print_absent_data(plans: Sequence[Plan]) -> None:
    """Print a line for each data file that does not exist yet."""
    for plan in plans:
        for source in plan.data.sources:
            if not is_present(source.path):
                typer.echo(f"{plan.spec.name}: {source.absent_line}")


def print_data_lines(files: Sequence[tuple[str, DataReport]]) -> None:
    """Print a line for each data file, one for columns that are not read, and warnings where many rows are left out or
    cut."""
    for name, report in files:
        for line in report.lines():
            typer.echo(f"{name}: {line}")
        for warning in report.warnings():
            print_error(f"{name}: {warning}")
