"""``flexrlhf join``."""

from __future__ import annotations

from typing import Annotated

import typer

from flexrlhf.cli.options import Force, RdzvEndpoint
from flexrlhf.cli.planning import check_memory, plan_runs
from flexrlhf.placement.hosts import Hosts
from flexrlhf.text import ranks_text

Number = Annotated[
    int | None, typer.Option(min=1, help="number of this node; without it the first free one, where all are equal")
]


def join(rdzv_endpoint: RdzvEndpoint = "", node_rank: Number = None, force: Force = False) -> None:
    """Start this machine's ranks of a run that node 0 describes.

    No config is needed here, only models and data.
    """
    Hosts(nnodes=2, rdzv_endpoint=rdzv_endpoint)
    from flexrlhf.launch.lifetime import quiet_torch

    quiet_torch()
    from flexrlhf.launch.job import checked_job
    from flexrlhf.launch.rendezvous import JOIN_SECONDS, endpoint_at, find_job
    from flexrlhf.runs.resume import resumed

    job = find_job(endpoint_at(rdzv_endpoint), JOIN_SECONDS)
    orders = job.offer.orders
    plans = plan_runs([order.spec for order in orders])
    check_memory(plans, force)
    cluster = plans[0].cluster
    hosts = Hosts(job.offer.nnodes, job.take_number(cluster) if node_rank is None else node_rank, rdzv_endpoint)
    names, ranks = ", ".join(plan.spec.name for plan in plans), ranks_text(hosts.local_ranks(cluster))
    typer.echo(f"joins {names} as node {hosts.node_rank} of {hosts.nnodes}: {ranks}")
    runs = [resumed(plan, order) for plan, order in zip(plans, orders, strict=True)]
    checked_job(runs, hosts).start(job.offer.max_restarts)
    typer.echo(f"{names} has ended; results are on node 0")
