"""``flexrlhf simulate``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import MeasuredIn, Profile, RunOptions, with_run_options
from flexrlhf.cli.planning import plan_runs
from flexrlhf.config.user_paths import check_output
from flexrlhf.errors import UserError

Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="response lengths: a number, a file or list of them, the directory of a run, or heavy-tail:MEAN; default: "
        "those in the data, else the maximum",
    ),
]
MeanResponse = Annotated[
    float | None, typer.Option(min=1, help="mean response length instead; lengths spread around it, as in `advise`")
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
Steps = Annotated[int, typer.Option(min=1, help="steps in that timeline")]


@with_run_options
def simulate(
    runs: RunOptions,
    lengths: Lengths = None,
    mean_response: MeanResponse = None,
    lags: Lags = None,
    segments: SegmentLengths = None,
    profile: Profile = None,
    from_: MeasuredIn = None,
    against: Against = None,
    output: Output = None,
    steps: Steps = 4,
) -> None:
    """Predict the time of a step and which devices idle.

    And what the step consists of. Starts nothing.
    """
    from flexrlhf.guideline.simulation.asynchrony import compare_lags, read_lags, read_segments
    from flexrlhf.guideline.simulation.asynchrony_text import format_asynchrony
    from flexrlhf.guideline.simulation.compare import compare, read_run
    from flexrlhf.guideline.simulation.inputs import costs_for
    from flexrlhf.guideline.simulation.lengths import read_lengths
    from flexrlhf.guideline.simulation.simulate import is_simulated, simulate, write_timeline
    from flexrlhf.guideline.simulation.simulation_text import format_comparison, format_simulation

    if output is not None:
        check_output(output, "--output", "trace.json", is_simulated, (*runs.paths, profile, against))
    variants = lags is not None or segments is not None
    if variants and (against or output):
        option, several = "--against" if against else "--output", "--segments" if lags is None else "--lags"
        raise UserError(f"{option}: goes with one run, and {several} compares several")
    measured = read_run(against) if against is not None else None
    found = None
    if from_ is not None:
        from flexrlhf.guideline.advice.replan import measured_text
        from flexrlhf.guideline.simulation.measured_run import measured_run
        from flexrlhf.report.run_record import read_record

        found = measured_run(read_record(from_), profile)
        typer.echo(measured_text(found) + "\n")
        if not runs.paths:
            runs = replace(runs, configs=[from_ / "config.yaml"])
    plans = plan_runs(runs.specs())
    if len(plans) > 1 and (against or output):
        raise UserError(f"{'--against' if against else '--output'}: goes with one config, found {len(plans)}")
    for plan in plans:
        source = costs_for(plan.spec, profile) if found is None else found.source
        is_measured = found is not None and lengths is None and mean_response is None
        expected = found.lengths if found is not None and is_measured else read_lengths(lengths, plan, mean_response)
        if variants:
            compared = compare_lags(plan.spec, source.costs, expected, read_lags(lags), read_segments(segments, plan))
            typer.echo(format_asynchrony(compared, source) + "\n")
            continue
        simulation = simulate(plan, source.costs, expected)
        typer.echo(format_simulation(simulation, source) + "\n")
        if measured is not None:
            typer.echo(format_comparison(compare(simulation, measured), against) + "\n")
        if output is not None:
            write_timeline(simulation, output, steps)
