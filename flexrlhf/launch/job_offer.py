"""Offer of a job: what node 0 publishes in the job's store, so that other machines join without a YAML."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from pydantic import TypeAdapter

from flexrlhf.comm.store import Endpoint, Notice, await_keys, connect_store
from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import Cluster
from flexrlhf.runs.resume import RunOrder

OFFER = "offer"


@dataclass(frozen=True)
class JobOffer:
    """A job that machines may join.

    orders:        runs that the ranks execute.
    nnodes:        machines of the job.
    max_restarts:  how often all ranks are started again after one has failed.
    """

    orders: tuple[RunOrder, ...]
    nnodes: int
    max_restarts: int


JOB_OFFER = TypeAdapter(JobOffer)
"""JSON of an offer."""


@dataclass(frozen=True)
class OpenJob:
    """A job that this machine is about to join.

    offer:  of node 0.
    store:  in which numbers of nodes are taken.
    """

    offer: JobOffer
    store: dist.Store

    def take_number(self, cluster: Cluster) -> int:
        """Return the first free number of a node, which is this machine's from now on.

        Raises UserError where the nodes of ``cluster`` differ, so that the numbers matter, and where none is free.
        """
        sizes = [len(cluster.ranks_on_node(node)) for node in range(self.offer.nnodes)]
        classes = [cluster.devices[cluster.ranks_on_node(node)[0]].device_class for node in range(self.offer.nnodes)]
        if len({*zip(sizes, classes, strict=True)}) > 1:
            raise UserError("--node-rank: missing; the nodes of this job differ, so give the number of this one")
        found = next(filter(self._is_free, range(1, self.offer.nnodes)), None)
        if found is None:
            raise UserError(f"join: all {self.offer.nnodes} nodes of this job are taken; start it with more --nnodes")
        return found

    def _is_free(self, number: int) -> bool:
        """Whether no machine has come under a number; this one then has it."""
        return not self.store.check([taken_key(number)]) and self.store.add(f"promised/{number}", 1) == 1


def find_job(endpoint: Endpoint, seconds: float) -> OpenJob:
    """Return the job whose store is served at ``endpoint``, once it is. Raises RunStopped where none comes in time."""
    notice = Notice(f"this machine waits for a job at {endpoint}")
    store = agreement_store(connect_store(endpoint, seconds, notice))
    await_keys(store, {OFFER: "node 0"}, seconds, notice)
    return OpenJob(JOB_OFFER.validate_json(store.get(OFFER)), store)


def agreement_store(store: dist.Store) -> dist.Store:
    """Return the part of a job's store in which its machines agree."""
    return dist.PrefixStore("agreement", store)


def taken_key(number: int) -> str:
    """Return the key that counts the machines under a number of a node."""
    return f"taken/{number}"
