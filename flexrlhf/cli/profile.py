"""``flexrlhf profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.cli.options import Devices, Overrides
from flexrlhf.cli.planning import plan_runs
from flexrlhf.cli.specs import load_specs
from flexrlhf.data.quickstart import prepare_corpus

Configs = Annotated[
    list[Path] | None, typer.Argument(help="YAML files whose models are measured; default: the quick start's PPO")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="file to write")]
Seconds = Annotated[float, typer.Option(min=0.1, help="time for which the calls of each model are repeated")]


def profile(
    configs: Configs = None,
    devices: Devices = None,
    set_: Overrides = None,
    output: Output = Path("runs/profile.json"),
    seconds: Seconds = 5.0,
) -> None:
    """Measure on this machine the times that `simulate` and `advise` predict from. Takes a minute, trains nothing."""
    plans = plan_runs(load_specs(configs, None, devices, set_))
    from flexrlhf.profiling.command import profile
    from flexrlhf.profiling.table import format_measurements

    measured_plans = plans
    if not configs:
        prepare_corpus()
        # PPO alone: it has the models of the stages before it
        measured_plans = plans[-1:]
    measurements = profile(measured_plans, plans, seconds, output, configs or ())
    typer.echo(f"\n{format_measurements(measurements)}\n\nwritten to {output}")
