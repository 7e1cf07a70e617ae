"""Predicted speed of the plans of a command, as ``flexrlhf plan`` prints it."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flexrlhf.api import Plan, UserError
from flexrlhf.guideline.simulation.inputs import check_prices, costs_for
from flexrlhf.guideline.simulation.lengths import read_lengths
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.guideline.simulation.simulation_text import format_prediction
from flexrlhf.guideline.simulation.usage import read_prices


def print_predictions(plans: Sequence[Plan], price: str | None) -> None:
    """Print the predicted speed of each run whose models and devices have known costs.

    Raises UserError for prices of runs without a prediction.
    """
    prices = read_prices(price, (name for plan in plans for name in plan.cluster.classes))
    for plan in plans:
        try:
            check_prices(plan.spec)
        except UserError as error:
            typer.echo(f"{plan.spec.name}: {error}\n")
        try:
            source = costs_for(plan.spec, None)
            simulation = simulate(plan, source.costs, read_lengths(None, plan))
        except UserError as error:
            if price is not None:
                raise UserError(f"--price {price}: no speed of {plan.spec.name} is predicted ({error})") from None
        else:
            typer.echo(f"{plan.spec.name}: {format_prediction(simulation, source, prices)}\n")
