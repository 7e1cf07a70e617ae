"""A job: the runs of one command, in order on the same ranks. Loading this imports no torch, so that a wrong config is
reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexrlhf.engines.capabilities import check_device
from flexrlhf.placement.hosts import Hosts, num_torchrun_ranks, under_torchrun, with_device
from flexrlhf.plan.inputs import check_runs
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan


@dataclass(frozen=True)
class Job:
    """Runs that are checked and have their directories.

    plans:   plans of the runs, in order
    hosts:   nodes of the job
    device:  ``cpu`` or ``cuda``, for all ranks
    """

    plans: tuple[Plan, ...]
    hosts: Hosts
    device: str

    def start(self) -> None:
        """Run on all ranks of this node, or, under torchrun, as one of them; returns when all runs have ended.

        Raises RankFailure when a rank fails and Interrupted on a signal; no process is left.
        """
        specs = [with_device(plan.spec, self.device) for plan in self.plans]
        if under_torchrun():
            from flexrlhf.execution.worker import work

            work(specs)
        else:
            from flexrlhf.execution.launch import launch

            launch(specs, self.plans[0], self.hosts)


def prepare_job(plans: Sequence[Plan], hosts: Hosts, is_quickstart: bool = False) -> Job:
    """Check devices, packages, models and data of all runs, then make their directories.

    ``is_quickstart``: write the quick start's corpus first. Raises UserError before any directory is made.
    """
    from flexrlhf.execution.launch import choose_device

    first, is_rank = plans[0], under_torchrun()
    num_local = num_torchrun_ranks(first.placement.num_ranks) if is_rank else hosts.num_local_ranks(first.cluster)
    device = choose_device(first.spec.cluster.device, num_local)
    for plan in plans:
        check_device(plan.placement, plan.shapes, device)
    if hosts.is_first or not is_rank:
        _check_inputs(plans, is_quickstart)
    if hosts.is_first:
        _make_directories(plans)
    return Job(tuple(plans), hosts, device)


def _check_inputs(plans: Sequence[Plan], is_quickstart: bool) -> None:
    from flexrlhf.data.quickstart import prepare_corpus

    if is_quickstart:
        prepare_corpus()
    check_runs(plans)


def _make_directories(plans: Sequence[Plan]) -> None:
    from flexrlhf.execution.run_directory import prepare_directory

    for plan in plans:
        prepare_directory(plan, format_plan(plan))
