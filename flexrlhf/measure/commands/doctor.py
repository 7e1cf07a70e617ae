"""``flexrlhf doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from flexrlhf.api import (
    Hosts,
    Nnodes,
    NodeRank,
    Plan,
    RankFactory,
    RdzvEndpoint,
    RunOptions,
    RunStopped,
    plan_runs,
    prepare_corpus,
    with_options,
)

Timeout = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="longest wait for another machine, and for a rank")
]


@with_options
def doctor(
    runs: RunOptions,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv_endpoint: RdzvEndpoint = "",
    timeout: Timeout = 60.0,
) -> None:
    """Check machines, software, connections and space.

    Before a run, on every machine of it. Exit code 0, or 1 if a check fails.
    """
    hosts = Hosts(nnodes, node_rank, rdzv_endpoint)
    specs = runs.specs(nnodes)
    hosts.check_single_planner(specs)
    plans = plan_runs(specs)
    hosts.check_cluster(plans[0].cluster)
    if not runs.paths:
        prepare_corpus()
    with RankFactory.starting(is_copied=True) as factory:
        run_preflight(plans, hosts, None, timeout, timeout, factory)


def run_preflight(
    plans: Sequence[Plan],
    hosts: Hosts,
    resume: str | None,
    join_seconds: float,
    rank_seconds: float,
    factory: RankFactory | None = None,
) -> None:
    """Check everything before ``plans`` run, and print a table on node 0; raises RunStopped if a check fails."""
    from flexrlhf.api import quiet_torch

    quiet_torch()
    from flexrlhf.api import resume_runs
    from flexrlhf.measure.doctor import preflight
    from flexrlhf.measure.facts import closing_line, failed, format_checks

    runs = [run for run in resume_runs(tuple(plans), resume, accepts=True) if not run.finished]
    if not runs:
        return
    checks = preflight(runs, hosts, join_seconds, rank_seconds, factory)
    shown = checks if hosts.is_first_node else [check for check in checks if check.result == "FAILS"]
    if shown:
        typer.echo(format_checks(shown))
    if failed(checks):
        raise RunStopped(f"preflight: {closing_line(checks)}")
    if hosts.is_first_node:
        typer.echo(f"\n{closing_line(checks)}")
