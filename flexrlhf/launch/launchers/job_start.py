"""Everything that a launcher takes to start a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.terms import Terms
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import RunOrder


@dataclass(frozen=True)
class JobStart:
    """A job that is about to start.

    orders:        runs that the ranks execute.
    plans:         of the same runs.
    hosts:         nodes of the job.
    max_restarts:  how often all ranks are started again after one has failed.
    make_terms:    returns what must be the same on all machines, as this one has it.
    factory:       of the ranks of this machine, for launchers that fork them.
    directories:   makes and locks the directories of the runs for as long as it is open, where its argument is true: by
                   one process of each machine that does not mount those of the first one.
    """

    orders: Sequence[RunOrder]
    plans: Sequence[Plan]
    hosts: Hosts
    max_restarts: int
    make_terms: Callable[[], Terms]
    factory: RankFactory | None
    directories: Callable[[bool], AbstractContextManager[None]]


Launcher = Callable[[JobStart], bool]
"""Starts a job and waits for its end. Returns whether a request has made the ranks save and end before all is done.

Raises RankFailure when a rank fails, Interrupted on a signal, UserError where machines differ; no process is left.
"""
