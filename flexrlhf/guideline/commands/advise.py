"""``flexrlhf advise``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flexrlhf.api import (
    Cluster,
    ConfigOption,
    OutputPath,
    Overrides,
    Price,
    RunOptions,
    Spec,
    UserError,
    complete_config,
    with_options,
    working,
)
from flexrlhf.guideline.advice.request import AdviceOptions
from flexrlhf.guideline.commands.basis import Basis, MeasuredIn, Profile

if TYPE_CHECKING:
    from flexrlhf.api import Spec
    from flexrlhf.guideline.advice.candidates import Method
    from flexrlhf.guideline.simulation.inputs import CostSource, TextLengths
    from flexrlhf.guideline.simulation.measured_run import MeasuredRun
    from flexrlhf.guideline.simulation.usage import Prices

Config = Annotated[
    Path | None,
    typer.Argument(help="YAML with the models, batch and cluster to advise on", autocompletion=complete_config),
]
MeanResponse = Annotated[float | None, typer.Option(min=1, help="mean response length; default: the maximum")]
Lengths = Annotated[str | None, typer.Option(metavar="WHAT", help="response lengths instead, as of `simulate`")]
MaxLag = Annotated[
    int | None,
    typer.Option(min=0, max=Spec.MAX_LAG, help="largest schedule.lag to choose; default: 1 is shown, none chosen"),
]
Seconds = Annotated[
    float,
    typer.Option(min=0.1, help="work of the searches, in seconds of an ordinary core: every machine finds the same"),
]
Tie = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="relative difference in seconds within which the simplest placement is taken, 0: always the fastest; "
        "default: the accuracy of the predictions",
    ),
]
PerOperator = Annotated[
    bool, typer.Option("--per-operator", help="a placement for each operator instead of each model")
]
MaxBatch = Annotated[
    bool, typer.Option("--max-batch", help="also try the largest batch of placements; today's is written")
]
Take = Annotated[
    Literal["guideline", "usual", "search"] | None,
    typer.Option(help="kind of placements whose fastest is used and written; default: the simplest of the fastest"),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write the recommended YAML")]


@with_options
def advise(
    *,
    config: Config = None,
    config_option: ConfigOption = None,
    options: AdviceOptions,
    mean_response: MeanResponse = None,
    lengths: Lengths = None,
    set_: Overrides = None,
    profile: Profile = None,
    seconds: Seconds = 15.0,
    tie: Tie = None,
    take: Take = None,
    per_operator: PerOperator = False,
    max_lag: MaxLag = None,
    max_batch: MaxBatch = False,
    from_: MeasuredIn = None,
    price: Price = None,
    output: Output = None,
) -> None:
    """Recommend a placement, with reasons and alternatives.

    And their predicted times. Starts nothing.
    """
    from flexrlhf.guideline.advice.advised_yaml import is_advised
    from flexrlhf.guideline.simulation.lengths import expected_lengths
    from flexrlhf.guideline.simulation.usage import read_prices

    if per_operator and tie is not None:
        raise UserError(f"--tie {tie:g}: --per-operator takes the fastest placement; leave one out")
    if per_operator and take not in (None, "search"):
        raise UserError(
            f"--take {take}: places models, and --per-operator searches placements of operators; leave one out"
        )
    if per_operator and max_batch:
        raise UserError("--max-batch: is tried for placements of models, not with --per-operator; leave one out")
    config = RunOptions(None if config is None else [config], config_option).only_path
    if output is not None:
        OutputPath(output, "--output").check_file("advised.yaml", is_advised, (config, options.cluster, profile))
    is_as_trained = from_ is not None and config is None
    if is_as_trained and (options.given or set_ or per_operator):
        raise UserError(f"--from {from_}: decides on that run as it is; to change a setting, give a config, too")
    basis = Basis.of(profile, from_)
    if basis.run is not None and is_as_trained:
        spec = basis.run.record.plan.spec
    else:
        spec = options.spec(config, tuple(set_ or ()))
    prices = read_prices(price, Cluster.of(spec.cluster).classes)
    expected = basis.lengths(lengths, mean_response, read=partial(expected_lengths, spec, lengths, mean_response))
    if basis.run is not None and is_as_trained:
        found = _on_run(replace(basis.run, lengths=expected), seconds, tie, take, max_batch, prices)
    elif per_operator:
        found = _on_operators(spec, basis.source(spec), expected, seconds, prices)
    else:
        found = _on_models(spec, basis.source(spec), expected, seconds, tie, take, max_lag, max_batch, prices)
    typer.echo(found.text)
    if output is not None:
        found.write(output)
        next_command = "run --resume auto" if is_as_trained else "plan"
        typer.echo(f"\nwritten to {output}: flexrlhf {next_command} {shlex.quote(str(output))}")


@dataclass(frozen=True)
class Recommendation:
    """Recommendation for a request.

    text:   for the terminal
    write:  writes the YAML that is recommended
    """

    text: str
    write: Callable[[Path], None]


def _on_run(
    run: MeasuredRun, seconds: float, tie: float | None, take: Method | None, max_batch: bool, prices: Prices | None
) -> Recommendation:
    """Return whether a run should go on under another placement."""
    from flexrlhf.guideline.advice.advice_text import format_advice
    from flexrlhf.guideline.advice.advised_yaml import write_advised
    from flexrlhf.guideline.advice.replan import format_replan, replan

    with working("searching for a placement"):
        found = replan(run, run.restart_seconds, None, seconds, tie, take)
    text = f"{format_advice(found.advice, run.source, max_batch, prices)}\n\n{format_replan(found)}"
    return Recommendation(text, partial(write_advised, found.best))


def _on_operators(
    spec: Spec, source: CostSource, lengths: TextLengths, seconds: float, prices: Prices | None
) -> Recommendation:
    """Return a placement of each operator."""
    from flexrlhf.guideline.advice.advised_yaml import write_operator_advice
    from flexrlhf.guideline.advice.operator_space import advise_operators
    from flexrlhf.guideline.advice.operator_text import format_operator_advice

    with working("searching for a placement of each operator"):
        operators = advise_operators(spec, source.costs, lengths, seconds)
    return Recommendation(format_operator_advice(operators, source, prices), partial(write_operator_advice, operators))


def _on_models(
    spec: Spec,
    source: CostSource,
    lengths: TextLengths,
    seconds: float,
    tie: float | None,
    take: Method | None,
    max_lag: int | None,
    max_batch: bool,
    prices: Prices | None,
) -> Recommendation:
    """Return a placement of each model."""
    from flexrlhf.guideline.advice.advice_text import format_advice
    from flexrlhf.guideline.advice.advise import advise, with_kind
    from flexrlhf.guideline.advice.advised_yaml import write_advised

    with working("searching for a placement"):
        margin = source.accuracy.tie if tie is None else tie
        advice = advise(spec, source.costs, lengths, seconds, margin, max_lag=max_lag)
        advice = advice if take is None else with_kind(advice, take)
    return Recommendation(format_advice(advice, source, max_batch, prices), partial(write_advised, advice.best))
