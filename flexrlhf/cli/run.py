"""``flexrlhf run``, and ``join``, which starts the ranks of another machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Annotated

import typer

from flexrlhf.cli.errors import EXIT_CODES, print_error
from flexrlhf.cli.options import Force, Launcher, Nnodes, NodeRank, RdzvEndpoint, RunOptions, with_options
from flexrlhf.cli.planning import check_memory, inspect_data, plan_runs, print_data_lines
from flexrlhf.cli.working import working
from flexrlhf.config.plugins import Plugin, load_plugin
from flexrlhf.config.secrets import without_secrets
from flexrlhf.display.plain_lines import width_of_output
from flexrlhf.display.summary_text import format_summary
from flexrlhf.errors import RunStopped, UserError, either
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.memory_text import measured_memory
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan, format_short_plan
from flexrlhf.signals import Ending
from flexrlhf.text import ranks_text

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check configs, models and data, print the plan, start nothing")
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[auto|PATH]",
        help="auto, or nothing: go on from the newest checkpoint of each run and skip finished ones; "
        "or the directory of a run or a checkpoint",
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="restart all ranks from the newest checkpoint so often after one has failed")
]

Fresh = Annotated[
    bool, typer.Option("--fresh", help="train all runs of the quick start again, finished and unchanged ones, too")
]
AcceptChanges = Annotated[
    bool,
    typer.Option("--accept-changes", help="--resume although types, models or code have changed since the checkpoint"),
]
Preflight = Annotated[bool, typer.Option("--preflight", help="first check what `flexrlhf doctor` does")]
Number = Annotated[
    int | None, typer.Option(min=1, help="number of this node; without it the first free one, where all are equal")
]
Replan = Annotated[
    str | None,
    typer.Option(
        metavar="every=N[,restart=SECONDS]",
        help="after every N steps, save and go on under another placement if the run ends sooner then, by its own "
        "times; restart: time that this takes, else as measured",
    ),
]
LEAST_EVERY = 3
"""Steps that a decision needs: the first one after a start is left out, and one alone says little."""
PREFLIGHT_SECONDS = 60.0
"""Longest wait of a preflight for a rank."""


@with_options
def run(
    runs: RunOptions,
    dry_run: DryRun = False,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    rdzv_endpoint: RdzvEndpoint = "",
    launcher: Launcher = "auto",
    max_restarts: MaxRestarts = 0,
    force: Force = False,
    resume: Resume = None,
    accept_changes: AcceptChanges = False,
    preflight: Preflight = False,
    fresh: Fresh = False,
    replan: Replan = None,
) -> None:
    """Train.

    Starts one process for each device of this node; under torchrun it is one of the ranks.
    """
    is_elsewhere, is_quickstart = launcher not in Hosts.LAUNCHERS, not runs.paths
    if is_elsewhere:
        Plugin.named("launchers", launcher, "--launcher", Hosts.LAUNCHERS)
    hosts = Hosts(nnodes, node_rank, rdzv_endpoint).of_launcher(launcher, os.environ)
    if preflight and dry_run:
        raise UserError("--preflight and --dry-run exclude each other, since a preflight starts ranks: remove one")
    if accept_changes and resume is None:
        raise UserError("--accept-changes: goes with --resume; a run that begins anew compares nothing, so remove it")
    if preflight and is_elsewhere:
        raise UserError(
            f"--preflight: not with --launcher {launcher}, which compares its nodes by itself before it starts"
        )
    check_restarts(max_restarts)
    _check_fresh(fresh, is_quickstart, resume)
    replanned = None if replan is None else _replan_settings(replan, launcher, hosts)
    if (notice := Hosts.rank_notice()) is not None:
        print_error(notice)
    with _said_to_others(Hosts() if dry_run else hosts):
        specs = runs.specs(hosts.nnodes)
        hosts.check_single_planner(specs)
        plans = plan_runs(specs)
        for spec in specs if replanned is not None else ():
            if not spec.checkpoint.on_signal:
                raise UserError(f"--replan {replan}: {spec.name} has checkpoint.on_signal: false; set it to true")
        check_memory(plans, force)
        hosts.check_cluster(plans[0].cluster)
    if dry_run:
        _check(plans, resume, is_quickstart, accept_changes)
        return
    if idle := hosts.check_srun(launcher, plans[0].cluster, os.environ):
        print_error(idle)
    with RankFactory.starting(not is_elsewhere, is_copied=True) as factory:
        from flexrlhf.launch.preparation import prepare_job

        if preflight:
            _preflight(plans, hosts, is_quickstart=is_quickstart, resume=resume, factory=factory)
        with _said_to_others(hosts), working("checking models and data"):
            keeps = is_quickstart and not fresh
            job = prepare_job(plans, hosts, is_quickstart, resume, launcher, keeps, accept_changes)
        if hosts.is_first:
            _print_plans(plans, job.plans, is_resumed=resume is not None)
        trained = list(job.plans)
        if replanned is None:
            job.start(max_restarts, factory)
        else:
            replanner = load_plugin("options", "replan")(job, {spec.name: spec for spec in specs}, *replanned)
            trained = replanner.start(max_restarts, factory)
        # results are there; what follows are words
        Ending.end_command(None)
    if hosts.is_first:
        for plan in trained:
            _print_summary(plan)
        if trained:
            typer.echo("\n" + "\n".join(next_commands(trained[-1], is_quickstart)))


def join(rdzv_endpoint: RdzvEndpoint = "", node_rank: Number = None, force: Force = False) -> None:
    """Start this machine's ranks of a run that node 0 describes.

    No config is needed here, only models and data.
    """
    # one of the further machines, whichever
    joining = Hosts(2, 1, rdzv_endpoint)
    # a process that has met others has threads, and cannot be copied
    with RankFactory.starting(is_copied=True) as factory:
        from flexrlhf.launch.preparation import checked_job
        from flexrlhf.launch.rendezvous import OpenJob
        from flexrlhf.runs.resume import Resumption

        with _said_to_others(joining):
            job = OpenJob.find(rdzv_endpoint)
            orders = job.offer.orders
            plans = plan_runs([order.spec for order in orders])
            check_memory(plans, force)
            cluster = plans[0].cluster
            hosts = Hosts(job.offer.nnodes, job.take_number(cluster) if node_rank is None else node_rank, rdzv_endpoint)
            names, ranks = ", ".join(plan.spec.name for plan in plans), ranks_text(hosts.local_ranks(cluster))
            typer.echo(f"joins {names} as node {hosts.node_rank} of {hosts.nnodes}: {ranks}")
            runs = [Resumption.ordered(plan, order) for plan, order in zip(plans, orders, strict=True)]
            checked = checked_job(runs, hosts)
        checked.start(job.offer.max_restarts, factory)
    Ending.end_command(None)
    typer.echo(f"{names} has ended; results are on node 0")


@contextmanager
def _said_to_others(hosts: Hosts) -> Iterator[None]:
    """Print a user's error of the body, say it to the other machines of the job, and exit."""
    try:
        yield
    except UserError as error:
        if hosts.nnodes == 1:
            raise
        print_error(str(error))
        from flexrlhf.launch.lifetime import quiet_torch

        quiet_torch()
        from flexrlhf.launch.rendezvous import OpenJob

        OpenJob.refuse(hosts, without_secrets(str(error)))
        raise typer.Exit(EXIT_CODES[UserError]) from None


def _check_fresh(fresh: bool, is_quickstart: bool, resume: str | None) -> None:
    if fresh and resume is not None:
        raise UserError("--fresh and --resume exclude each other: remove one")
    if fresh and not is_quickstart:
        raise UserError("--fresh: goes with the quick start; a config of your own begins anew without it, so remove it")


def _replan_settings(text: str, launcher: str, hosts: Hosts) -> tuple[int, float | None]:
    """Return the steps between two decisions, and the time of a restart, if that is given. Raises UserError."""
    if hosts.nnodes > 1 or launcher not in Hosts.LAUNCHERS or Hosts.under_torchrun():
        raise UserError(
            f"--replan {text}: goes with the ranks of one machine that this command starts; elsewhere `flexrlhf advise "
            f"--from RUN` says whether to stop and --resume under another placement"
        )
    values = dict(part.strip().partition("=")[::2] for part in text.split(","))
    try:
        every, restart = int(values.pop("every")), values.pop("restart", None)
        seconds = None if restart is None else float(restart)
        if values or every < LEAST_EVERY or (seconds is not None and not 0 <= seconds < inf):
            raise ValueError
    except (KeyError, ValueError):
        raise UserError(
            f"--replan {text}: expected every=N, at least {LEAST_EVERY} steps, and perhaps restart=SECONDS, such as "
            f"every=50,restart=120"
        ) from None
    return every, seconds


def _check(plans: Sequence[Plan], resume: str | None, is_quickstart: bool, accepts: bool) -> None:
    from flexrlhf.plan.input_checks import check_runs
    from flexrlhf.runs.resume import resume_runs

    resume_runs(tuple(plans), resume, accepts)
    files = []
    if not is_quickstart:
        check_runs(plans)
        files = inspect_data(plans)
    typer.echo("\n\n".join(map(format_plan, plans)) + "\n" * bool(files))
    print_data_lines(files)


def _preflight(
    plans: Sequence[Plan], hosts: Hosts, *, is_quickstart: bool, resume: str | None, factory: RankFactory | None
) -> None:
    """Check everything before a rank trains. Raises RunStopped if a check fails."""
    from flexrlhf.data.quickstart import prepare_corpus
    from flexrlhf.launch.rendezvous import JOIN_SECONDS

    if is_quickstart:
        prepare_corpus()
    load_plugin("options", "preflight")(plans, hosts, resume, JOIN_SECONDS, PREFLIGHT_SECONDS, factory)
    if hosts.is_first_node:
        typer.echo("")


def _print_plans(plans: Sequence[Plan], due: Sequence[Plan], *, is_resumed: bool) -> None:
    """Print the plans of runs that are due, and why others are not."""
    why = "skipped" if is_resumed else "kept; its config is unchanged (--fresh trains it again)"
    for plan in plans:
        text = format_short_plan(plan, width_of_output()) if plan in due else f"{plan.spec.name}: finished, {why}"
        typer.echo(f"{text}\n")


def _print_summary(plan: Plan) -> None:
    """Print the metrics, samples and memory of a run."""
    from flexrlhf.runs.run_directory import RunDirectory

    directory = RunDirectory(plan.spec.directory)
    rows, samples = directory.metrics.read(), directory.samples.read()
    width = width_of_output()
    typer.echo("\n" + format_summary(plan.spec.name, str(directory), rows, samples, width))
    typer.echo("\n".join(measured_memory(plan, directory.facts(), width)))
    check_scores(plan, rows)


def check_scores(plan: Plan, rows: Sequence[Mapping[str, float]]) -> None:
    """Raise RunStopped if no response of a run had a score. ``rows``: its metrics, step by step."""
    if rows and all(row.get("score_failed", 0.0) >= 1.0 for row in rows):
        keys = {
            f"{section}.{key}"
            for section, sources in (("reward", plan.spec.reward), ("cost", plan.spec.cost))
            for source in sources or ()
            for key in source.model_fields_set & {"function", "url", "rule"}
        }
        raise RunStopped(
            f"{plan.spec.name}: no response of the run had a score, so that it has learned nothing; mend "
            f"{either(sorted(keys) or ['the source of scores'])}, whose warnings have the cause"
        )


def next_commands(plan: Plan, is_quickstart: bool) -> list[str]:
    """Return commands to go on with after a run, each with its purpose."""
    directory, commands = shlex.quote(str(plan.spec.directory)), []
    if "actor" in plan.outputs.values() and plan.model("actor").path is not None:
        commands.append((f"flexrlhf chat {directory} --before", "talk to the policy and the one that it started from"))
    commands.append((f"flexrlhf report {directory}", "curves, timeline and memory as a page for a browser"))
    if is_quickstart:
        commands += [
            ("flexrlhf run --placement-ratio 1,1,0.5,0.5", "the same results under another placement"),
            (f"flexrlhf compare {directory}.1 {directory}", "both runs side by side"),
        ]
    return ["next", *(line for command, purpose in commands for line in (f"  {purpose}", f"    {command}"))]


def check_restarts(max_restarts: int) -> None:
    """Raise UserError for restarts under torchrun, which starts the ranks and so restarts them."""
    if max_restarts and Hosts.under_torchrun():
        raise UserError(f"--max-restarts {max_restarts}: torchrun started this rank, so use its own --max-restarts")
