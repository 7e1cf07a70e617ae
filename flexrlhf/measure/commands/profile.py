"""``flexrlhf profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexrlhf.api import (
    ConfigOption,
    Devices,
    Hosts,
    Nnodes,
    NodeRank,
    Overrides,
    Plan,
    RdzvEndpoint,
    RunOptions,
    complete_config,
    plan_runs,
    prepare_corpus,
)

Configs = Annotated[
    list[Path] | None,
    typer.Argument(
        help="YAML files whose models are measured; default: the quick start's PPO", autocompletion=complete_config
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="file to write")]
Seconds = Annotated[float, typer.Option(min=0.1, help="time of all measurements; longer where calls are slow")]


def profile(
    configs: Configs = None,
    config: ConfigOption = None,
    devices: Devices = None,
    set_: Overrides = None,
    output: Output = Path("runs/profile.json"),
    seconds: Seconds = 30.0,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv_endpoint: RdzvEndpoint = "",
) -> None:
    """Measure this machine, for `simulate` and `advise`.

    The times that they predict from: of the layers of its models, and of the links between several machines. Takes
    about a minute and trains nothing. With several nodes node 0 measures the layers and writes the file.
    """
    runs = RunOptions(configs, config, devices=devices, set_=set_)
    hosts = Hosts(nnodes, node_rank, rdzv_endpoint)
    plans = plan_runs(runs.specs(nnodes))
    hosts.check_cluster(plans[0].cluster)
    network = None
    if nnodes > 1:
        network = _network(plans[0], hosts)
        if not hosts.is_first_node:
            typer.echo(f"slowest link between machines: {network:.3g} GB/s; node 0 measures the rest")
            return
    from flexrlhf.measure.profile import format_measurements, profile

    measured_plans = plans
    if not runs.paths:
        prepare_corpus()
        # PPO alone: it has the models of the stages before it
        measured_plans = plans[-1:]
    measurements = profile(measured_plans, plans, seconds, output, runs.paths, network)
    typer.echo(f"\n{format_measurements(measurements)}\n\nwritten to {output}")


def _network(plan: Plan, hosts: Hosts) -> float:
    """Measure the links between all machines with all their ranks; return GB/s."""
    from flexrlhf.api import quiet_torch

    quiet_torch()
    from flexrlhf.measure.doctor import measure_network

    return measure_network(plan, hosts)
