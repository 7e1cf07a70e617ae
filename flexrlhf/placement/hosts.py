"""Nodes of a job, as --nnodes, --node-rank and --rdzv-endpoint, torchrun's or SLURM's environment give them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import ClassVar, NamedTuple

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import Cluster

SLURM_STEP = "SLURM_STEP_ID"
"""Variable of a process that ``srun`` started as one of the tasks of a step."""
FIRST_PORT, NUM_PORTS = 20000, 20000
"""Ports of which each of SLURM's jobs has one of its own by its number."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


class HostPort(NamedTuple):
    """Address of a server; an IPv6 address is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return ``HOST:PORT``, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, endpoint: str) -> HostPort | None:
        """Return host and port of ``HOST:PORT``; None for another text."""
        found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\s\[\]/@]+)):([0-9]+)", endpoint)
        if found is None or (found[1] is not None and not _is_ipv6(found[1])):
            return None
        return cls(found[1] or found[2], int(found[3]))


def _is_ipv6(host: str) -> bool:
    try:
        IPv6Address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Hosts:
    """Nodes of a job, under torchrun's names. Raises UserError if they contradict each other.

    nnodes:         number of nodes
    node_rank:      number of this node, from 0
    rdzv_endpoint:  HOST:PORT of node 0, where several nodes meet
    """

    LAUNCHERS: ClassVar = ("auto", "local", "torchrun", "slurm")
    """Launchers that start the ranks of this machine, or one of them; others start them wherever they are."""
    LOOPBACK: ClassVar = "127.0.0.1"
    """Address where the ranks of one machine meet."""
    MOST_PORT: ClassVar = 65535

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""

    def __post_init__(self) -> None:
        if self.node_rank >= self.nnodes:
            raise UserError(
                f"--node-rank {self.node_rank}: must be less than --nnodes {self.nnodes}; the first node is 0"
            )
        if self.nnodes > 1 or self.rdzv_endpoint:
            self._check_endpoint()

    def _check_endpoint(self) -> None:
        endpoint = self.rdzv_endpoint
        if not endpoint:
            raise UserError("--rdzv-endpoint: missing; several nodes need HOST:PORT of node 0")
        if HostPort.parse(endpoint) is None:
            bare = re.sub(r".*[/@]", "", endpoint.rstrip("/"))
            host, _, port = bare.rpartition(":")
            likely = (bare, f"[{host}]:{port}", f"{bare}:29500", f"[{bare}]:29500", f"{bare.split(':')[0]}:29500")
            such = next((each for each in likely if HostPort.parse(each) is not None), "HOST:29500")
            raise UserError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT, such as {such}")
        host, _, port = endpoint.rpartition(":")
        if len(port) > 5 or not 1 <= int(port) <= Hosts.MOST_PORT:
            raise UserError(f"--rdzv-endpoint {endpoint}: no port, use 1 to {Hosts.MOST_PORT}, such as {host}:29500")

    def check_cluster(self, cluster: Cluster) -> None:
        """Raise UserError unless several nodes are as many as the cluster has, and for an endpoint of one node."""
        if self.nnodes == 1 and self.rdzv_endpoint:
            raise UserError(f"--rdzv-endpoint {self.rdzv_endpoint}: goes with --nnodes of 2 or more, found 1")
        if self.nnodes > 1 and cluster.num_nodes != self.nnodes:
            raise UserError(f"--nnodes {self.nnodes}: cluster.nodes has {cluster.num_nodes}; both must be the same")

    def num_local_ranks(self, cluster: Cluster) -> int:
        """Number of ranks to start on this node."""
        return len(self.local_ranks(cluster))

    def local_ranks(self, cluster: Cluster) -> tuple[int, ...]:
        """Return the ranks to start on this node: of its devices, or of the whole cluster with one node."""
        return cluster.ranks_on_node(self.node_rank) if self.nnodes > 1 else tuple(range(len(cluster.devices)))

    @property
    def is_first_node(self) -> bool:
        """Whether this is node 0, which serves the job's store."""
        return self.node_rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this process makes the run directories and prints: rank 0 under torchrun, else node 0."""
        return os.environ.get("RANK") == "0" if Hosts.under_torchrun() else self.node_rank == 0

    def check_single_planner(self, specs: Iterable[Spec]) -> None:
        """Raise UserError for ``placement: auto`` if several processes would each search by measurements of their own
        machine."""
        if self.nnodes == 1 and not Hosts.under_torchrun():
            return
        for spec in specs:
            if spec.placement == "auto" and not Cluster.of(spec.cluster).has_known_gpus(spec.cluster):
                raise UserError(
                    f"placement: auto of {spec.name} would be chosen by each of several processes; write it once with "
                    f"`flexrlhf advise CONFIG -o FILE` and run that file"
                )

    def check_srun(self, launcher: str, cluster: Cluster, environment: Mapping[str, str]) -> str:
        """Return a sentence about nodes of SLURM's job that a run on one of them leaves idle; empty without any.

        Raises UserError if the cluster has several nodes, of which srun would start a task each.
        """
        nodes = _slurm_nodes(environment)
        if launcher != "auto" or self.nnodes > 1 or Hosts.under_torchrun() or nodes == 1:
            return ""
        start = "start it with srun --ntasks-per-node=1"
        if cluster.num_nodes > 1:
            raise UserError(
                f"SLURM: the job has {nodes} nodes and cluster.nodes {cluster.num_nodes}, but this process would start "
                f"all ranks on one; {start}, or as `flexrlhf slurm` writes it, or give --launcher local"
            )
        idle = f"SLURM: the job has {nodes} nodes, of which this run uses one; {start} for more"
        return "" if SLURM_STEP in environment else idle

    def of_launcher(self, launcher: str, environment: Mapping[str, str]) -> Hosts:
        """Return the nodes of a job, these of ``--nnodes`` and its like, or of SLURM.

        ``launcher``: ``auto`` is SLURM if this process is one of several tasks and no nodes were given.
        Raises UserError for a launcher that did not start this process, and for one of several processes of mpirun.
        """
        if launcher == "torchrun" and not Hosts.under_torchrun():
            raise UserError("--launcher torchrun: RANK and WORLD_SIZE are not in the environment; start with torchrun")
        is_elsewhere = launcher not in Hosts.LAUNCHERS
        if (launcher == "local" or is_elsewhere) and Hosts.under_torchrun():
            raise UserError(
                f"--launcher {launcher}: another launcher started this process as a rank; unset RANK, WORLD_SIZE"
            )
        if is_elsewhere and self != Hosts():
            raise UserError(
                f"--nnodes: with --launcher {launcher} the nodes are those of cluster.nodes; start one command"
            )
        is_alone = launcher == "auto" and self.nnodes == 1 and not Hosts.under_torchrun()
        counts = [environment.get(f"SLURM_STEP_NUM_{name}", "1") for name in ("NODES", "TASKS")]
        is_step = SLURM_STEP in environment and counts != ["1", "1"]
        if is_alone:
            _check_mpi(environment, is_step)
        return slurm_hosts(environment, self.rdzv_endpoint) if launcher == "slurm" or (is_alone and is_step) else self

    @staticmethod
    def rank_notice() -> str | None:
        """Return a sentence about variables that make this process a rank although torchrun did not start it."""
        if "TORCHELASTIC_RUN_ID" in os.environ or not Hosts.under_torchrun():
            return None
        found = ", ".join(f"{name}={os.environ[name]}" for name in _RANK_VARIABLES)
        return (
            f"{found} in the environment: this process is rank {os.environ['RANK']} of a job of "
            f"{os.environ['WORLD_SIZE']} ranks that another launcher started, and waits for the others; "
            f"if it is not, run `unset {' '.join(_RANK_VARIABLES)}` first"
        )

    @staticmethod
    def under_torchrun() -> bool:
        """Return whether a launcher started this process as one of several ranks."""
        return "TORCHELASTIC_RUN_ID" in os.environ or set(_RANK_VARIABLES) <= set(os.environ)


def _check_mpi(environment: Mapping[str, str], is_step: bool) -> None:
    """Raise UserError for one of several processes, each of which would start all ranks.

    ``is_step``: whether srun started it, which sets the variables of PMI, too.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", *(() if is_step else ("PMI_SIZE",))):
        if environment.get(name, "1") not in ("", "0", "1"):
            raise UserError(
                f"mpirun: {name}={environment[name]} in the environment, and each of these processes would start all "
                f"ranks; start one on each machine with --nnodes and --node-rank, or a rank each with torchrun; for "
                f"this one alone, --launcher local"
            )
    if environment.get("WORLD_SIZE", "1") != "1" and "RANK" in environment:
        raise UserError(
            f"RANK={environment['RANK']}, WORLD_SIZE={environment['WORLD_SIZE']} in the environment without "
            f"MASTER_ADDR; set it, or unset RANK and WORLD_SIZE, or give --launcher local"
        )


def _slurm_nodes(environment: Mapping[str, str]) -> int:
    """Return the nodes of SLURM's job, of all components of a heterogeneous one; 1 outside a job."""
    if "SLURM_JOB_ID" not in environment:
        return 1
    components = _count(environment, "SLURM_HET_SIZE")
    parts = [_count(environment, f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}") for number in range(components)]
    return sum(parts) if components > 1 else _count(environment, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def slurm_hosts(environment: Mapping[str, str], rdzv_endpoint: str = "") -> Hosts:
    """Return the nodes of the step that this process is a task of.

    ``rdzv_endpoint``: HOST:PORT of node 0; without it a port that follows from the job on the step's first node.
    Raises UserError outside a step, and unless every node has one task.
    """
    if SLURM_STEP not in environment:
        raise UserError(f"--launcher slurm: {SLURM_STEP} missing from the environment; start with srun, a task a node")
    nodes, tasks = (_number(environment, name) for name in ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"))
    if tasks != nodes:
        alone = ", or --launcher local for this one alone" if nodes == 1 else ""
        raise UserError(
            f"srun: {tasks} tasks on {nodes} nodes; a task starts all ranks of its node: use --ntasks-per-node=1{alone}"
        )
    if nodes == 1:
        return Hosts()
    # of a heterogeneous job the first component has node 0
    listed = environment.get("SLURM_JOB_NODELIST_HET_GROUP_0") or environment.get("SLURM_STEP_NODELIST", "")
    port = FIRST_PORT + _number(environment, "SLURM_JOB_ID") % NUM_PORTS
    return Hosts(nodes, _number(environment, "SLURM_NODEID"), rdzv_endpoint or f"{first_host(listed)}:{port}")


def first_host(listed: str) -> str:
    """Return the first host of a list such as ``gpu[03-05,7],login1``. Raises UserError for an empty one."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", listed)
    if found is None:
        raise UserError("SLURM_STEP_NODELIST: no host in the environment of this task; give --rdzv-endpoint HOST:PORT")
    return "".join(part or "" for part in found.groups())


def _count(environment: Mapping[str, str], *names: str) -> int:
    """Return the first number of some variables, 1 without any."""
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), 1)


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(f"{name}: {value!r} in the environment of a task; srun sets a number")
    return int(value)
