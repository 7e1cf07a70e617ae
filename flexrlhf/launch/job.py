"""A job: the runs of one command, in order on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from flexrlhf.errors import Interrupted, Preempted, RankFailure, one_line
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.terms import Terms
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.plan_text import format_plan
from flexrlhf.runs.resume import Resumption, RunOrder
from flexrlhf.runs.run_directory import RunDirectory

Watch = Callable[[Path], AbstractContextManager[object]]


class Launcher(Protocol):
    """Way to start the ranks of a job. What a rank does is the same under all of them.

    failures:  exceptions of its library by which a start may fail; each ends the command with a sentence
    """

    failures: tuple[type[Exception], ...]

    def device(self, plan: Plan, hosts: Hosts) -> str:
        """Return ``cpu`` or ``cuda`` for all ranks of a job with ``plan``. Raises UserError if they cannot start."""

    def __call__(self, job: Job, max_restarts: int, factory: RankFactory | None) -> bool:
        """Start the ranks and wait for their end; arguments and errors are those of ``Job.start``.

        Returns whether a request has made the ranks save and end before all is done.
        """


@dataclass(frozen=True)
class Job:
    """Runs that are checked.

    runs:      the runs that are not finished, in order, and how each begins
    hosts:     nodes of the job
    device:    ``cpu`` or ``cuda``, for all ranks
    launcher:  of the ranks; None without runs
    watch:     context that is open while the ranks of this machine run; its argument is the file whose existence makes
               them save and end
    """

    runs: tuple[Resumption, ...]
    hosts: Hosts
    device: str
    launcher: Launcher | None
    watch: Watch = nullcontext

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the runs."""
        return tuple(run.plan for run in self.runs)

    @property
    def orders(self) -> list[RunOrder]:
        """Orders to the ranks, one for each run."""
        return [
            RunOrder(each.plan.spec.with_device(self.device), each.candidates, each.continues, each.program)
            for each in self.runs
        ]

    def terms(self, max_restarts: int = 0) -> Terms:
        """Return the terms of this machine, which must be the same on all."""
        return Terms.of(self.plans, self.device, self.hosts.nnodes, max_restarts)

    def start(self, max_restarts: int = 0, factory: RankFactory | None = None) -> None:
        """Start the ranks of this node, or be one of them; returns when all runs have ended.

        ``max_restarts``: how often the ranks are started again after one has failed; under torchrun it restarts them.
        ``factory``: of the ranks, started while the runs were checked.

        Raises UserError if machines differ or a directory cannot be written, RankFailure if a rank fails,
        Interrupted on a signal and Preempted on a request to save and end; no process is left.
        """
        if not self.runs:
            return
        assert self.launcher is not None, "a job with runs has a launcher"
        try:
            is_stopped = self.launcher(self, max_restarts, factory)
        except self.launcher.failures as error:
            name = type(self.launcher).__name__
            raise RankFailure(f"{name} has failed: {one_line(str(error)) or type(error).__name__}") from error
        if is_stopped:
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
                RunDirectory(run.plan.spec.directory).mark_stopped()
            raise
        finally:
            for lock in locks:
                lock.close()


def stopped_sentence(plans: Sequence[Plan]) -> str:
    """Return where the job has stopped on a request, and the command that goes on with it."""
    for plan in plans:
        status = RunDirectory(plan.spec.directory).status
        if status is not None and status.state == "stopped":
            saved = f"{plan.spec.name} has stopped after {status.next_step} of {status.steps} steps"
            return f"{saved}; the same command with --resume goes on" if status.next_step else saved
    return "the job has stopped before its end, on a request; the same command with --resume goes on"


def _make_directories(runs: Sequence[Resumption]) -> tuple[IO[str], ...]:
    """Make the directories; each one's lock is to be closed when the job ends."""
    return tuple(
        RunDirectory(run.plan.spec.directory).prepare(run.plan.spec, format_plan(run.plan), run.continues)
        for run in runs
    )
