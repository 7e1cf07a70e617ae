"""Launcher of this machine's ranks by torch's elastic agent; with several nodes each has one of its own."""

from __future__ import annotations

from flexrlhf.launch.job_offer import JobOffer
from flexrlhf.launch.launchers.job_start import JobStart
from flexrlhf.launch.rendezvous import NodeRendezvous
from flexrlhf.launch.start import launch


def start(job: JobStart) -> bool:
    """Start the ranks of this node once all nodes agree."""
    rendezvous = NodeRendezvous(job.hosts)
    shares = True
    if job.hosts.nnodes > 1:
        offer = JobOffer(tuple(job.orders), job.hosts.nnodes, job.max_restarts)
        shares = rendezvous.agree(offer, job.plans, job.make_terms)
    with job.directories(job.hosts.is_first_node or not shares):
        return launch(job.orders, job.plans[0], job.hosts, job.max_restarts, rendezvous, shares, job.factory)
