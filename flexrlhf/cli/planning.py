"""Plans of a command's runs, with their memory checked."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flexrlhf.cli.errors import print_error
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.plan.pipeline import make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.suggestions import check_fits


def plan_runs(specs: Sequence[Spec]) -> list[Plan]:
    """Plan the runs of a command; prints the placement that ``placement: auto`` chooses."""
    return make_plans([_with_chosen_placement(spec) for spec in specs])


def _with_chosen_placement(spec: Spec) -> Spec:
    if spec.placement != "auto":
        return spec
    from flexrlhf.guideline.advice.auto import with_placement

    chosen, sentence = with_placement(spec)
    typer.echo(sentence + "\n")
    return chosen


def check_memory(plans: Sequence[Plan], force: bool) -> None:
    """Raise UserError for a plan that exceeds the memory of its devices; with ``force`` print the sentence instead."""
    for plan in plans:
        try:
            check_fits(plan)
        except UserError as error:
            if not force:
                raise
            print_error(f"{error} (--force: continuing)")
