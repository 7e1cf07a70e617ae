"""Launcher of the ranks of this node."""

from __future__ import annotations

from functools import partial

from flexrlhf.config.job_secret import JobSecret
from flexrlhf.launch.devices import choose_device
from flexrlhf.launch.job import Job
from flexrlhf.launch.lifetime import changed_environment
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.rendezvous import JobOffer, NodeRendezvous
from flexrlhf.launch.start import launch
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan


class LocalLauncher:
    """Start of the ranks of this node by torch's elastic agent, with several nodes once all agree."""

    failures: tuple[type[Exception], ...] = ()

    def device(self, plan: Plan, hosts: Hosts) -> str:
        """Return the device of the ranks, by the devices of this machine."""
        ranks = hosts.local_ranks(plan.cluster)
        return choose_device(plan.spec.cluster.device, len(ranks), plan.cluster.planned_gpu(ranks))

    def __call__(self, job: Job, max_restarts: int, factory: RankFactory | None) -> bool:
        rendezvous, shares, variables = NodeRendezvous(job.hosts), True, dict[str, str]()
        if job.hosts.nnodes > 1:
            offer = JobOffer(tuple(job.orders), job.hosts.nnodes, max_restarts)
            shares = rendezvous.agree(offer, job.plans, partial(job.terms, max_restarts))
            # ranks verify calls of a program with a secret that this job has made, too
            variables[JobSecret.VARIABLE] = rendezvous.secret
        with changed_environment(variables), job.directories(job.hosts.is_first_node or not shares):
            return launch(job.orders, job.plans[0], job.hosts, max_restarts, rendezvous, shares, factory, job.watch)
