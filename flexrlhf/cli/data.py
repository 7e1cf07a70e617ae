"""``flexrlhf data``."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flexrlhf.cli.errors import print_error
from flexrlhf.cli.options import ConfigOption, Configs, Overrides, RunOptions
from flexrlhf.cli.planning import plan_runs
from flexrlhf.data.quickstart import prepare_corpus
from flexrlhf.errors import UserError
from flexrlhf.plan.data_report import format_inspection
from flexrlhf.plan.data_sources import data_sources
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import check_inspection, inspect_source, tokenizer_run
from flexrlhf.plan.run_tokenizer import load_run_tokenizer


def data(configs: Configs = None, config: ConfigOption = None, set_: Overrides = None) -> None:
    """Show what is in the data, and what limits drop or cut.

    The files of each run, how many rows its limits drop or cut, and some rows as it has them. Exit code 0, or 2 if
    a row or file cannot be used.
    """
    runs = RunOptions(configs, config, set_=set_)
    plans = plan_runs(runs.specs())
    if not runs.paths:
        prepare_corpus()
    problems = [problem for index, plan in enumerate(plans) for problem in _report(plan, plans[:index])]
    if problems:
        for problem in problems[:-1]:
            print_error(problem)
        raise UserError(problems[-1])


def _report(plan: Plan, earlier: Sequence[Plan]) -> list[str]:
    """Print the reports about the files of a run. Returns a sentence for each with which ``run`` would stop."""
    owner, problems = tokenizer_run(plan, earlier) or plan, []
    try:
        tokenizer = load_run_tokenizer(owner)
    except UserError as error:
        return [f"{plan.spec.name}: {error}"]
    for source in data_sources(plan):
        try:
            found = inspect_source(plan, source, tokenizer)
            typer.echo(f"{plan.spec.name}: {format_inspection(source, found, tokenizer.decode)}\n")
            check_inspection(source, found)
        except UserError as error:
            problems.append(f"{plan.spec.name}: {source.key}: {error}")
    return problems
