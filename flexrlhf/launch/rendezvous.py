"""Rendezvous of the launchers of a job: a store on the first node, a word on the nodes that are missing, and the offer
by which other machines join without a YAML.

The job's store listens on the loopback address with one node and on the address of ``--rdzv-endpoint`` with several.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from flexrlhf.comm.store import Endpoint, Notice, await_keys
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch.agreement import Member, agree
from flexrlhf.launch.refusals import LISTEN_SECONDS, agreement_store, check_refused, refuse_others, write_refusal
from flexrlhf.launch.shared_secret import found_secret, made_secret
from flexrlhf.launch.terms import Terms
from flexrlhf.placement.cluster import Cluster
from flexrlhf.placement.hosts import HostPort, Hosts
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.signals import Ending, handled

OFFER = "offer"
JOIN_SECONDS = 900.0
"""Longest wait for the launchers of all nodes."""
REJOIN_SECONDS = 120.0
"""Longest wait before a restart, in which launchers end their ranks and a connection may come back."""


@dataclass(frozen=True)
class JobOffer:
    """A job that machines may join.

    orders:        runs that the ranks execute.
    nnodes:        machines of the job.
    max_restarts:  how often all ranks are started again after one has failed.
    secret_file:   with the secret of the job, on machines that mount the runs of node 0; empty if it is set by hand.
    """

    orders: tuple[RunOrder, ...]
    nnodes: int
    max_restarts: int
    secret_file: str = ""


JOB_OFFER = TypeAdapter(JobOffer)


class NodeRendezvous(RendezvousHandler):
    """Meeting of the launchers of fixed nodes, once for every attempt to run the ranks.

    attempt:  number of the one that the nodes have come to last, from 0.
    secret:   of the job, once the nodes have agreed; empty without any.
    """

    def __init__(self, hosts: Hosts, join_seconds: float = JOIN_SECONDS, attempt: int = 0) -> None:
        """Meet nobody yet.

        join_seconds:  longest wait for the launchers of all nodes
        attempt:       the first one of these launchers
        """
        self._hosts, self._join_seconds = hosts, join_seconds
        self._sign: socket.socket | None = None
        self._first_attempt, self.attempt = attempt, attempt - 1
        one = Endpoint("loopback", Hosts.LOOPBACK, 0)
        self._endpoint = one if hosts.nnodes == 1 else endpoint_at(hosts.rdzv_endpoint)
        self.store: dist.TCPStore | None = None
        self.secret = ""

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "nodes"

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks connect to the store of the launchers."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the next attempt once the launchers of all nodes have come to it.

        Raises RunStopped when one is missing for too long or node 0 has ended, UserError if the store cannot be served.
        """
        self.attempt += 1
        hosts = self._hosts
        store = dist.PrefixStore(f"nodes/{self.attempt}", self._opened())
        # one machine waits for no other
        waiting = handled(Ending()) if hosts.nnodes > 1 else nullcontext()
        try:
            with waiting:
                self._join(store, self._join_seconds if self.attempt == self._first_attempt else REJOIN_SECONDS)
        except dist.DistNetworkError:
            raise RunStopped(f"node {hosts.node_rank} waits for the other nodes: node 0 has ended") from None
        port = self._opened().port if hosts.nnodes == 1 else self._endpoint.port
        return RendezvousInfo(store, hosts.node_rank, hosts.nnodes, RendezvousStoreInfo(self._endpoint.host, port))

    def agree(self, offer: JobOffer, plans: Sequence[Plan], make_terms: Callable[[], Terms]) -> bool:
        """Publish the job on node 0, and compare the terms of all nodes before the first attempt.

        Returns and raises as ``agreement.agree`` does.
        """
        hosts, store = self._hosts, agreement_store(self._opened())
        self._take_number(store)
        member = Member(hosts.node_rank, hosts.nnodes, socket.gethostname())
        if hosts.is_first_node:
            with made_secret(plans) as file:
                offered = JOB_OFFER.dump_json(replace(offer, secret_file=file)).decode()
                self.secret = JobSecret.here().value
                store.set(OFFER, JobSecret.here().signed(OFFER, offered))
                return agree(store, member, plans, make_terms, self._join_seconds)
        notice = Notice(f"{member.name} waits for {member.first}")
        await_keys(store, {OFFER: "node 0"}, self._join_seconds, notice, partial(check_refused, store))
        with found_secret(_secret_file(store)):
            self.secret = JobSecret.here().value
            return agree(store, member, plans, make_terms, self._join_seconds)

    def _opened(self) -> dist.TCPStore:
        """Return the store of the job, which node 0 serves from here on."""
        if self.store is None:
            self.store = self._open()
        return self.store

    def _open(self) -> dist.TCPStore:
        if self._hosts.is_first_node:
            return self._endpoint.serve(self._hosts.nnodes > 1, self._join_seconds)
        notice = Notice(f"node {self._hosts.node_rank} waits for node 0 at {self._endpoint}")
        store = self._endpoint.connect(self._join_seconds, notice)
        with suppress(OSError):
            self._sign = socket.create_connection((self._endpoint.host, self._endpoint.port))
        return store

    def await_end(self, seconds: float) -> None:
        """Wait until node 0 no longer serves the store, so that the next job of this command joins a new one."""
        if self._sign is None:
            return
        with self._sign as sign, suppress(OSError):
            sign.settimeout(seconds)
            sign.recv(1)

    def _join(self, store: dist.Store, seconds: float) -> None:
        """Wait for the launchers of all nodes. Raises UserError if two have the same number."""
        hosts = self._hosts
        self._take_number(store)
        store.set(f"node/{hosts.node_rank}", socket.gethostname())
        keys = {f"node/{node}": f"node {node}" for node in range(hosts.nnodes)}
        await_keys(store, keys, seconds, Notice(f"node {hosts.node_rank} waits for the other nodes"))

    def _take_number(self, store: dist.Store) -> None:
        if store.add(taken_key(self._hosts.node_rank), 1) > 1:
            raise UserError(f"--node-rank {self._hosts.node_rank}: another machine has joined under this number")

    def is_closed(self) -> bool:
        """Return False: the nodes of a job are fixed."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the nodes of a job are fixed."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return "flexrlhf"

    def shutdown(self) -> bool:
        """Drop the store; node 0's server ends with it."""
        self.store = None
        return True


def endpoint_at(address: str) -> Endpoint:
    """Return the endpoint of ``HOST:PORT``, of which ``Hosts`` has checked the form."""
    found = HostPort.parse(address)
    assert found is not None, f"{address} is no address of a store"
    return Endpoint("--rdzv-endpoint", *found)


@dataclass(frozen=True)
class OpenJob:
    """A job that this machine is about to join.

    offer:  of node 0.
    store:  in which numbers of nodes are taken.
    """

    offer: JobOffer
    store: dist.Store

    @classmethod
    def find(cls, address: str, seconds: float = JOIN_SECONDS) -> OpenJob:
        """Return the job whose store is served at ``endpoint``, once it is.

        Raises RunStopped if none comes in time, UserError if it has another secret.
        """
        endpoint = endpoint_at(address)
        notice = Notice(f"this machine waits for a job at {endpoint}")
        store = agreement_store(endpoint.connect(seconds, notice))
        try:
            await_keys(store, {OFFER: "node 0"}, seconds, notice, partial(check_refused, store))
        except RuntimeError as error:
            # as torch reports a store that is closed
            raise RunStopped(f"{notice.what}: node 0 has ended before the job began") from error
        with found_secret(_secret_file(store)):
            if not JobSecret.here().value:
                raise UserError(JobSecret.NO_SECRET)
            return cls(JOB_OFFER.validate_json(JobSecret.here().verified(OFFER, store.get(OFFER).decode())), store)

    def take_number(self, cluster: Cluster) -> int:
        """Return the first free number of a node, which is this machine's from now on.

        Raises UserError if the nodes of ``cluster`` differ, so that the numbers matter, and if none is free.
        """
        sizes = [len(cluster.ranks_on_node(node)) for node in range(self.offer.nnodes)]
        classes = [cluster.devices[cluster.ranks_on_node(node)[0]].device_class for node in range(self.offer.nnodes)]
        if len({*zip(sizes, classes, strict=True)}) > 1:
            raise UserError("--node-rank: missing; the nodes of this job differ, so give the number of this one")
        for number in range(1, self.offer.nnodes):
            if not self.store.check([taken_key(number)]) and self.store.add(f"promised/{number}", 1) == 1:
                return number
        raise UserError(f"join: all {self.offer.nnodes} nodes of this job are taken; start it with more --nnodes")

    @staticmethod
    def refuse(hosts: Hosts, sentence: str) -> None:
        """Say to the machines that wait for node 0, or to node 0 if it is there, why this one does not begin."""
        endpoint = endpoint_at(hosts.rdzv_endpoint)
        if hosts.is_first_node:
            refuse_others(endpoint, hosts.nnodes - 1, sentence)
        if hosts.is_first_node or not endpoint.is_served:
            return
        with suppress(RuntimeError, RunStopped, UserError):
            # it may end meanwhile
            store = agreement_store(endpoint.connect(LISTEN_SECONDS, Notice("a refusal", prints=False)))
            file = _secret_file(store) if store.check([OFFER]) else ""
            with found_secret(file if Path(file).is_file() else ""):
                write_refusal(store, sentence)


def _secret_file(store: dist.Store) -> str:
    """Return the file that an offer names, which nothing has verified yet."""
    return JOB_OFFER.validate_json(store.get(OFFER).decode().partition("\n")[2]).secret_file


def taken_key(number: int) -> str:
    """Return the key that counts the machines under a number of a node."""
    return f"taken/{number}"
