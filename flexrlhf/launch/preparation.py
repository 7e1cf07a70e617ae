"""Checks of a job before its ranks start. Loading this imports no torch, so that a wrong config is reported at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flexrlhf.config.plugins import load_plugin
from flexrlhf.errors import UserError
from flexrlhf.launch.job import Job, Launcher
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.input_checks import check_runs
from flexrlhf.plan.model_checks import check_device
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.free_space import DiskDemand
from flexrlhf.runs.resume import Resumption, resume_runs
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_loggers import RunLoggers


def prepare_job(
    plans: Sequence[Plan],
    hosts: Hosts,
    is_quickstart: bool = False,
    resume: str | None = None,
    launcher: str = "auto",
    keeps: bool = False,
    accepts: bool = False,
) -> Job:
    """Check devices, packages, models, data and free space of all runs. Nothing of a run is written yet.

    is_quickstart:  write the quick start's corpus first
    resume:         ``auto``: go on with interrupted runs and skip finished ones; or a run's or a checkpoint's directory
    launcher:       name of the launcher of the ranks
    keeps:          without ``resume``: leave out runs whose results are there already, except for the last one; not
                    under torchrun, where each machine would decide by its own directory
    accepts:        whether a resumed run may have other types, models and code than before

    Raises UserError.
    """
    keeps = keeps and not Hosts.under_torchrun()
    if hosts.nnodes > 1 and not hosts.is_first_node and (keeps or resume is not None):
        finished = (RunDirectory(plan.spec.directory).has_finished(plan.spec.steps) for plan in plans)
        found = [] if resume is not None and all(finished) else _ordered_runs(plans, hosts)
    else:
        found = Resumption.kept(plans) if keeps and resume is None else resume_runs(tuple(plans), resume, accepts)
    runs = [run for run in found if not run.finished]
    for note in (note for run in runs for note in run.notes):
        print(note, file=sys.stderr)
    return checked_job(runs, hosts, is_quickstart, launcher) if runs else Job((), hosts, "cpu", None)


def _ordered_runs(plans: Sequence[Plan], hosts: Hosts) -> list[Resumption]:
    """Return how each run begins by the orders of node 0, which alone need have the checkpoints.

    Raises UserError if its command has another run, RunStopped if it does not come.
    """
    from flexrlhf.launch.rendezvous import OpenJob

    by_name = {plan.spec.name: plan for plan in plans}
    orders = OpenJob.find(hosts.rdzv_endpoint).offer.orders
    for order in orders:
        if order.spec.name not in by_name:
            known = ", ".join(by_name)
            raise UserError(f"node 0 has a run {order.spec.name}, this machine {known}; start the same command on both")
    return [Resumption.ordered(by_name[order.spec.name], order) for order in orders]


def checked_job(runs: Sequence[Resumption], hosts: Hosts, is_quickstart: bool = False, launcher: str = "auto") -> Job:
    """Return the job of ``runs`` once this machine can do its part. Raises UserError."""
    from flexrlhf.launch.lifetime import quiet_torch

    quiet_torch()
    plans = [run.plan for run in runs]
    name = ("torchrun" if Hosts.under_torchrun() else "local") if launcher in Hosts.LAUNCHERS else launcher
    starter: Launcher = load_plugin("launchers", name)()
    device = starter.device(plans[0], hosts)
    for plan in plans:
        check_device(plan.placement, plan.shapes, device)
    if hosts.is_first or not Hosts.under_torchrun():
        if is_quickstart:
            from flexrlhf.data.quickstart import prepare_corpus

            prepare_corpus()
        check_runs(plans)
    if hosts.is_first:
        DiskDemand.check(runs)
        for plan in plans:
            RunLoggers.check(plan.spec)
    return Job(tuple(runs), hosts, device, starter)
