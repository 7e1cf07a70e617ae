"""``flexrlhf simulate``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.api import OutputPath, Price, RunOptions, UserError, lack_text, plan_runs, with_options
from flexrlhf.guideline.commands.basis import Basis, MeasuredIn, Profile

Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="response lengths: a number, a list such as [200,300], a file with them, the directory of a run, or "
        "heavy-tail:MEAN; default: those in the data, else the maximum",
    ),
]
MeanResponse = Annotated[
    float | None, typer.Option(min=1, help="mean response length instead; lengths spread around it, as in `advise`")
]
Replies = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="times of an environment's replies: seconds, or heavy-tail:SECONDS, whose mean that is; default: as a "
        "profile or the run of --from has measured them, else environment.seconds",
    ),
]
Lags = Annotated[
    str | None,
    typer.Option(metavar="K,K", help="compare runs with these values of schedule.lag, such as 0,1,2,4, in one table"),
]
SegmentLengths = Annotated[
    str | None,
    typer.Option("--segments", metavar="T,T", help="the same, with responses generated in segments of T tokens"),
]
Against = Annotated[Path | None, typer.Option(help="timeline.json of a run to compare with")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write the timeline as a Chrome trace")]
DEFAULT_STEPS = 4
Steps = Annotated[int, typer.Option(min=1, help="steps in that timeline")]


@with_options
def simulate(
    runs: RunOptions,
    lengths: Lengths = None,
    mean_response: MeanResponse = None,
    replies: Replies = None,
    lags: Lags = None,
    segments: SegmentLengths = None,
    profile: Profile = None,
    from_: MeasuredIn = None,
    price: Price = None,
    against: Against = None,
    output: Output = None,
    steps: Steps = DEFAULT_STEPS,
) -> None:
    """Predict the time of a step and which devices idle.

    And what the step consists of. Of a plan that exceeds the memory of its devices, too, after a line on it. Starts
    nothing.
    """
    from flexrlhf.guideline.advice.replan import measured_text
    from flexrlhf.guideline.simulation.asynchrony import compare_lags, read_lags, read_segments
    from flexrlhf.guideline.simulation.asynchrony_text import format_asynchrony
    from flexrlhf.guideline.simulation.compare import compare, read_run
    from flexrlhf.guideline.simulation.lengths import mean_of_steps, read_lengths, with_replies
    from flexrlhf.guideline.simulation.simulate import check_timeline, is_simulated, simulate, write_timeline
    from flexrlhf.guideline.simulation.simulation_text import format_comparison, format_simulation
    from flexrlhf.guideline.simulation.usage import read_prices

    if steps != DEFAULT_STEPS and output is None:
        raise UserError(f"--steps {steps}: goes with --output, whose timeline has so many steps; give --output, too")
    if output is not None:
        OutputPath(output, "--output").check_file("trace.json", is_simulated, (*runs.paths, profile, against))
    given = {"--lags": lags, "--segments": segments}
    several = [option for option, value in given.items() if value is not None]
    if several and (against or output):
        option = "--against" if against else "--output"
        raise UserError(f"{option}: goes with one run, and {several[0]} compares several")
    if several and price is not None:
        raise UserError(f"--price {price}: is of one run, and {several[0]} compares several; leave one out")
    measured = read_run(against) if against is not None else None
    basis = Basis.of(profile, from_)
    if from_ is not None and basis.run is not None:
        typer.echo(measured_text(basis.run) + "\n")
        runs = runs if runs.paths else replace(runs, configs=[from_ / "config.yaml"])
    plans = plan_runs(runs.specs())
    if len(plans) > 1 and (against or output):
        raise UserError(f"{'--against' if against else '--output'}: goes with one config, found {len(plans)}")
    if output is not None:
        check_timeline(plans[0], steps)
    prices = read_prices(price, (name for plan in plans for name in plan.cluster.classes))
    for plan in plans:
        if lack := lack_text(plan):
            typer.echo(f"{plan.spec.name}: does not fit: {lack}\n")
        source = with_replies(basis.source(plan.spec), plan.spec, replies)
        read = partial(read_lengths, lengths, plan, mean_response)
        expected = basis.lengths(lengths, mean_response, read=read)
        if several:
            compared = compare_lags(plan.spec, source.costs, expected, read_lags(lags), read_segments(segments, plan))
            typer.echo(format_asynchrony(compared, source) + "\n")
            continue
        simulation = simulate(plan, source.costs, expected)
        typer.echo(format_simulation(simulation, source, prices) + "\n")
        if against is not None and measured is not None:
            comparison = compare(simulation, measured)
            own_mean = mean_of_steps(against.parent, comparison.steps)
            typer.echo(format_comparison(comparison, against, expected, own_mean) + "\n")
        if output is not None:
            write_timeline(simulation, output, steps)
