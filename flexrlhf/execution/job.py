"""A job: the runs of one command, in order on the same ranks. Loading this imports no torch, so that a wrong config is
reported at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from flexrlhf.engines.capabilities import check_device
from flexrlhf.errors import Preempted
from flexrlhf.execution.free_space import check_free_space
from flexrlhf.execution.resumption import Resumption, resume_runs
from flexrlhf.execution.run_directory import prepare_directory, read_status, unfinished_run
from flexrlhf.execution.run_order import RunOrder
from flexrlhf.placement.hosts import Hosts, num_torchrun_ranks, under_torchrun, with_device
from flexrlhf.plan.inputs import check_runs
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan


@dataclass(frozen=True)
class Job:
    """Runs that are checked and have their directories.

    runs:    the runs that are not finished, in order, and how each begins
    hosts:   nodes of the job
    device:  ``cpu`` or ``cuda``, for all ranks
    locks:   open files that keep other processes from the directories of the runs
    """

    runs: tuple[Resumption, ...]
    hosts: Hosts
    device: str
    locks: tuple[IO[str], ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the runs."""
        return tuple(run.plan for run in self.runs)

    def start(self, max_restarts: int = 0) -> None:
        """Run on all ranks of this node, or, under torchrun, as one of them; returns when all runs have ended.

        ``max_restarts``: how often the ranks are started again after one has failed; under torchrun it restarts them.
        Raises RankFailure when a rank fails, Interrupted on a signal and Preempted on a request to save and end; no
        process is left.
        """
        if not self.runs:
            return
        orders = [RunOrder(with_device(run.plan.spec, self.device), run.candidates) for run in self.runs]
        try:
            self._start(orders, max_restarts)
        finally:
            for lock in self.locks:
                lock.close()

    def _start(self, orders: Sequence[RunOrder], max_restarts: int) -> None:
        if under_torchrun():
            from flexrlhf.execution.worker import work

            if not work(orders):
                raise Preempted(stopped_sentence(self.plans))
        else:
            from flexrlhf.execution.launch import launch

            if launch(orders, self.plans[0], self.hosts, max_restarts):
                raise Preempted(stopped_sentence(self.plans))


def stopped_sentence(plans: Sequence[Plan]) -> str:
    """Return where the job has stopped on a request, and what goes on with it."""
    for plan in plans:
        status = read_status(plan.spec.directory)
        if status is not None and status.state == "stopped":
            saved = f"{plan.spec.name} has stopped after {status.next_step} of {status.steps} steps"
            return f"{saved}; the same command with --resume goes on" if status.next_step else saved
    return "stopped between two runs; the same command with --resume goes on"


def prepare_job(plans: Sequence[Plan], hosts: Hosts, is_quickstart: bool = False, resume: str | None = None) -> Job:
    """Check devices, packages, models, data and free space of all runs, then make their directories.

    is_quickstart:  write the quick start's corpus first
    resume:         ``auto``: go on with interrupted runs and skip finished ones; or a run's or a checkpoint's directory

    Raises UserError before any directory is made.
    """
    from flexrlhf.execution.lifetime import quiet_torch

    quiet_torch()
    from flexrlhf.execution.launch import choose_device

    runs = [run for run in resume_runs(tuple(plans), resume) if not run.finished]
    if not runs:
        return Job((), hosts, "cpu")
    plans = [run.plan for run in runs]
    first, is_rank = plans[0], under_torchrun()
    num_local = num_torchrun_ranks(first.placement.num_ranks) if is_rank else hosts.num_local_ranks(first.cluster)
    device = choose_device(first.spec.cluster.device, num_local)
    for plan in plans:
        check_device(plan.placement, plan.shapes, device)
    if hosts.is_first or not is_rank:
        _check_inputs(plans, is_quickstart)
    if hosts.is_first:
        check_free_space(runs)
    locks = _make_directories(runs) if hosts.is_first else ()
    return Job(tuple(runs), hosts, device, locks)


def _check_inputs(plans: Sequence[Plan], is_quickstart: bool) -> None:
    from flexrlhf.data.quickstart import prepare_corpus

    if is_quickstart:
        prepare_corpus()
    check_runs(plans)


def _make_directories(runs: Sequence[Resumption]) -> tuple[IO[str], ...]:
    """Make the directories; each one's lock is to be closed when the job ends."""
    for run in runs:
        directory = run.plan.spec.directory
        if not run.continues and (sentence := unfinished_run(directory)) is not None:
            print(f"flexrlhf: {sentence}", file=sys.stderr)
    return tuple(prepare_directory(run.plan, format_plan(run.plan), run.continues) for run in runs)
