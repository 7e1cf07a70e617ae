"""``flexrlhf plan`` and ``data``: the plans of runs, and the contents of their data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.errors import print_error
from flexrlhf.cli.options import (
    ActorModelPath,
    ConfigOption,
    Configs,
    Force,
    Overrides,
    Price,
    RunOptions,
    with_options,
)
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_absent_data, print_data_lines
from flexrlhf.cli.working import working
from flexrlhf.config.output_path import OutputPath
from flexrlhf.config.plugins import load_plugin
from flexrlhf.data.quickstart import prepare_corpus
from flexrlhf.errors import UserError
from flexrlhf.plan.data_report import DataReport
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan

Html = Annotated[
    Path | None,
    typer.Option(help="write a page with the placement, the predicted timeline and the memory to this file"),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="write the YAML with every setting, also those that are chosen or the default"),
]
WRITTEN = "# every setting of"


@with_options
def plan(runs: RunOptions, force: Force = False, price: Price = None, html: Html = None, output: Output = None) -> None:
    """Print placement, schedule, memory and speed of each run.

    Transfers and process groups, too. Data that exists is checked. Starts nothing.
    """
    paths = runs.paths
    page = None if html is None else load_plugin("options", "html")(html, paths)
    if output is not None:
        OutputPath(output, "--output").check_file("full.yaml", lambda text: text.startswith(WRITTEN), paths)
    plans = plan_runs(runs.specs())
    if output is not None and len(plans) > 1:
        raise UserError(f"--output: goes with one config, found {len(plans)}")
    for each in plans:
        typer.echo(format_plan(each) + "\n")
    found = []
    if paths:
        # to read models and data takes the libraries of a rank, which load for seconds
        from flexrlhf.plan.input_checks import check_inputs

        with working("reading models and data"):
            check_inputs(plans)
            found = inspect_data(plans)
    _print_predictions(plans, price)
    if paths:
        print_data_lines(found)
        print_absent_data(plans)
    if page is not None:
        with working(f"writing {html}"):
            written = page.write(plans)
        typer.echo(written.text)
    check_memory(plans, force)
    if output is not None:
        OutputPath(output, "--output").write(f"{WRITTEN} {plans[0].spec.name}\n{plans[0].spec.dump()}")
        typer.echo(f"written to {output}")


def _print_predictions(plans: Sequence[Plan], price: str | None) -> None:
    """Print the predicted speed of each run. Raises UserError for prices if nothing predicts."""
    try:
        print_predictions = load_plugin("options", "predictions")
    except UserError as error:
        if price is not None:
            raise
        print_error(f"no speed is predicted: {error}")
    else:
        print_predictions(plans, price)


def data(
    configs: Configs = None,
    config: ConfigOption = None,
    actor_model_path: ActorModelPath = None,
    set_: Overrides = None,
) -> None:
    """Show what is in the data, and what limits drop or cut.

    The files of each run, how many rows its limits drop or cut, and some rows as it has them. Exit code 0, or 2 if
    a row or file cannot be used.
    """
    runs = RunOptions(configs, config, actor_model_path, set_=set_)
    plans = plan_runs(runs.specs())
    if not runs.paths:
        prepare_corpus()
    problems = [problem for index, plan in enumerate(plans) for problem in _report_data(plan, plans[:index])]
    if problems:
        for problem in problems[:-1]:
            print_error(problem)
        raise UserError(problems[-1])


def _report_data(plan: Plan, earlier: Sequence[Plan]) -> list[str]:
    """Print the reports about the files of a run. Returns a sentence for each with which ``run`` would stop."""
    owner, problems = plan.data.tokenizer_run(earlier) or plan, []
    try:
        tokenizer = owner.tokenizer.load()
    except UserError as error:
        return [f"{plan.spec.name}: {error}"]
    for source in plan.data.sources:
        try:
            with working(f"reading {source.path}"):
                found = plan.data.inspect(source, tokenizer)
            report = DataReport(source, found.counts)
            typer.echo(f"{plan.spec.name}: {report.whole(found, tokenizer.decode)}\n")
            source.check(found)
            for line in plan.data.solution_lines(source):
                typer.echo(f"{plan.spec.name}: {line}\n")
            if source.is_training:
                typer.echo(f"{plan.spec.name}: {report.passes_line(plan)}\n")
        except UserError as error:
            problems.append(f"{plan.spec.name}: {source.key}: {error}")
    return problems
