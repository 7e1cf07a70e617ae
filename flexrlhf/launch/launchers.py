"""Ways to start the ranks of a job. What a rank does is the same under all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flexrlhf.launch.job import Job
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.ray_driver import start_in_ray
from flexrlhf.launch.rendezvous import JobOffer, NodeRendezvous
from flexrlhf.launch.start import launch
from flexrlhf.launch.worker import work


def start_here(job: Job, max_restarts: int, factory: RankFactory | None) -> bool:
    """Start the ranks of this node by torch's elastic agent, with several nodes once all agree."""
    rendezvous, shares = NodeRendezvous(job.hosts), True
    if job.hosts.nnodes > 1:
        offer = JobOffer(tuple(job.orders), job.hosts.nnodes, max_restarts)
        shares = rendezvous.agree(offer, job.plans, partial(job.terms, max_restarts))
    with job.directories(job.hosts.is_first_node or not shares):
        return launch(job.orders, job.plans[0], job.hosts, max_restarts, rendezvous, shares, factory, job.watch)


def be_rank(job: Job, max_restarts: int, factory: RankFactory | None) -> bool:
    """Be one of the ranks, if torchrun or another system has started a process for each device."""
    return not work(job.orders, begin=job)


LAUNCHERS: dict[str, Callable[[Job, int, RankFactory | None], bool]] = {
    "local": start_here,
    "torchrun": be_rank,
    "ray": start_in_ray,
}
"""By the names of ``Job``: each starts a job and waits for its end.

Its arguments are the job, how often the ranks are started again after one has failed, and the factory that forks those
of this machine. Returns whether a request has made the ranks save and end before all is done. Raises RankFailure when a
rank fails, Interrupted on a signal, UserError if machines differ; no process is left.
"""
