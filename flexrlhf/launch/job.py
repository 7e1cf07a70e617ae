"""A job: the runs of one command, in order on the same ranks. Loading this imports no torch, so that a wrong config is
reported at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from flexrlhf.errors import Interrupted, Preempted, UserError
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.terms import Terms, terms_of
from flexrlhf.loggers.base import check_loggers
from flexrlhf.placement.hosts import Hosts, num_torchrun_ranks, planned_gpu, under_torchrun, with_device
from flexrlhf.plan.input_checks import check_runs
from flexrlhf.plan.model_checks import check_device
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.free_space import check_free_space
from flexrlhf.runs.resume import Resumption, RunOrder, is_finished, keep_runs, resume_runs, resumed
from flexrlhf.runs.run_directory import prepare_directory, read_status, write_status

Watch = Callable[[Path], AbstractContextManager[object]]


@dataclass(frozen=True)
class Job:
    """Runs that are checked.

    runs:      the runs that are not finished, in order, and how each begins
    hosts:     nodes of the job
    device:    ``cpu`` or ``cuda``, for all ranks
    launcher:  of the ranks
    watch:     context that is open while the ranks of this machine run; its argument is the file whose existence makes
               them save and end
    """

    runs: tuple[Resumption, ...]
    hosts: Hosts
    device: str
    launcher: str
    watch: Watch = nullcontext

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the runs."""
        return tuple(run.plan for run in self.runs)

    @property
    def orders(self) -> list[RunOrder]:
        """Orders to the ranks, one for each run."""
        return [
            RunOrder(with_device(each.plan.spec, self.device), each.candidates, each.continues, each.program)
            for each in self.runs
        ]

    def terms(self, max_restarts: int = 0) -> Terms:
        """Return the terms of this machine, which must be the same on all."""
        return terms_of(self.plans, self.device, self.hosts.nnodes, max_restarts)

    def start(self, max_restarts: int = 0, factory: RankFactory | None = None) -> None:
        """Start the ranks of this node, or be one of them; returns when all runs have ended.

        ``max_restarts``: how often the ranks are started again after one has failed; under torchrun it restarts them.
        ``factory``: of the ranks, started while the runs were checked.

        Raises UserError if machines differ or a directory cannot be written, RankFailure if a rank fails,
        Interrupted on a signal and Preempted on a request to save and end; no process is left.
        """
        if not self.runs:
            return
        from flexrlhf.launch.launchers import LAUNCHERS

        if LAUNCHERS[self.launcher](self, max_restarts, factory):
            raise Preempted(stopped_sentence(self.plans))

    @contextmanager
    def directories(self, keeps: bool) -> Iterator[None]:
        """Make and lock the directories of the runs while this is open, if ``keeps``; a signal stops what runs there.

        One process of each machine does so that does not mount the directories of the first one.
        """
        locks = _make_directories(self.runs) if keeps else ()
        try:
            yield
        except (Interrupted, KeyboardInterrupt):
            for run in self.runs if keeps else ():
                _mark_stopped(run.plan.spec.directory)
            raise
        finally:
            for lock in locks:
                lock.close()


def _mark_stopped(directory: Path) -> None:
    """Write that a run has stopped, if its ranks were ended in its middle."""
    status = read_status(directory)
    if status is not None and status.state == "running":
        write_status(directory, replace(status, state="stopped"))


def stopped_sentence(plans: Sequence[Plan]) -> str:
    """Return where the job has stopped on a request, and the command that goes on with it."""
    for plan in plans:
        status = read_status(plan.spec.directory)
        if status is not None and status.state == "stopped":
            saved = f"{plan.spec.name} has stopped after {status.next_step} of {status.steps} steps"
            return f"{saved}; the same command with --resume goes on" if status.next_step else saved
    return "the job has stopped before its end, on a request; the same command with --resume goes on"


def prepare_job(
    plans: Sequence[Plan],
    hosts: Hosts,
    is_quickstart: bool = False,
    resume: str | None = None,
    under_ray: bool = False,
    keeps: bool = False,
    accepts: bool = False,
) -> Job:
    """Check devices, packages, models, data and free space of all runs. Nothing of a run is written yet.

    is_quickstart:  write the quick start's corpus first
    resume:         ``auto``: go on with interrupted runs and skip finished ones; or a run's or a checkpoint's directory
    under_ray:      whether the ranks start in a Ray cluster
    keeps:          without ``resume``: leave out runs whose results are there already, except for the last one; not
                    under torchrun, where each machine would decide by its own directory
    accepts:        whether a resumed run may have other types, models and code than before

    Raises UserError.
    """
    keeps = keeps and not under_torchrun()
    if hosts.nnodes > 1 and not hosts.is_first_node and (keeps or resume is not None):
        found = [] if resume is not None and all(map(is_finished, plans)) else _ordered_runs(plans, hosts)
    else:
        found = keep_runs(tuple(plans)) if keeps and resume is None else resume_runs(tuple(plans), resume, accepts)
    runs = [run for run in found if not run.finished]
    for note in (note for run in runs for note in run.notes):
        print(note, file=sys.stderr)
    return checked_job(runs, hosts, is_quickstart, under_ray) if runs else Job((), hosts, "cpu", "local")


def _ordered_runs(plans: Sequence[Plan], hosts: Hosts) -> list[Resumption]:
    """Return how each run begins by the orders of node 0, which alone need have the checkpoints.

    Raises UserError if its command has another run, RunStopped if it does not come.
    """
    from flexrlhf.launch.rendezvous import JOIN_SECONDS, endpoint_at, find_job

    by_name = {plan.spec.name: plan for plan in plans}
    orders = find_job(endpoint_at(hosts.rdzv_endpoint), JOIN_SECONDS).offer.orders
    for order in orders:
        if order.spec.name not in by_name:
            known = ", ".join(by_name)
            raise UserError(f"node 0 has a run {order.spec.name}, this machine {known}; start the same command on both")
    return [resumed(by_name[order.spec.name], order) for order in orders]


def checked_job(runs: Sequence[Resumption], hosts: Hosts, is_quickstart: bool = False, under_ray: bool = False) -> Job:
    """Return the job of ``runs`` once this machine can do its part. Raises UserError."""
    from flexrlhf.launch.lifetime import quiet_torch

    quiet_torch()
    plans = [run.plan for run in runs]
    is_rank = under_torchrun()
    device = _device_in_ray(plans[0]) if under_ray else _device_of_this_node(plans[0], hosts)
    for plan in plans:
        check_device(plan.placement, plan.shapes, device)
    if hosts.is_first or not is_rank:
        if is_quickstart:
            from flexrlhf.data.quickstart import prepare_corpus

            prepare_corpus()
        check_runs(plans)
    if hosts.is_first:
        check_free_space(runs)
        for plan in plans:
            check_loggers(plan.spec)
    return Job(tuple(runs), hosts, device, "ray" if under_ray else "torchrun" if is_rank else "local")


def _device_of_this_node(plan: Plan, hosts: Hosts) -> str:
    """Return the device of the ranks of a job, by the devices of this machine."""
    from flexrlhf.launch.start import choose_device

    is_rank, planned = under_torchrun(), plan.placement.num_ranks
    num_local = num_torchrun_ranks(planned) if is_rank else hosts.num_local_ranks(plan.cluster)
    ranks = (int(os.environ["RANK"]),) if is_rank else hosts.local_ranks(plan.cluster)
    return choose_device(plan.spec.cluster.device, num_local, planned_gpu(plan.cluster, ranks))


def _device_in_ray(plan: Plan) -> str:
    """Return the device of the ranks of a job, by the devices of the Ray cluster."""
    from flexrlhf.launch.ray_cluster import ray_device, require_ray

    require_ray()
    ranks = range(plan.placement.num_ranks)
    return ray_device(plan.spec.cluster.device, len(ranks), planned_gpu(plan.cluster, ranks))


def _make_directories(runs: Sequence[Resumption]) -> tuple[IO[str], ...]:
    """Make the directories; each one's lock is to be closed when the job ends."""
    return tuple(prepare_directory(run.plan, format_plan(run.plan), run.continues) for run in runs)
