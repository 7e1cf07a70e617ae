"""Nodes of a job that SLURM started, from the environment of one of its tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flexrlhf.errors import UserError
from flexrlhf.placement.hosts import Hosts, under_torchrun

STEP = "SLURM_STEP_ID"
FIRST_PORT, NUM_PORTS = 20000, 20000
"""Ports of which each job has one of its own by its number."""


def is_several_nodes(environment: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process as one of the tasks of a step on several nodes."""
    return STEP in environment and environment.get("SLURM_STEP_NUM_NODES", "1") != "1"


def hosts_of(launcher: str, given: Hosts, environment: Mapping[str, str]) -> Hosts:
    """Return the nodes of a job: those of ``--nnodes`` and its like, or of SLURM.

    ``launcher``: ``auto`` is SLURM where this process is a task on one of several nodes and none were given.
    Raises UserError for a launcher that did not start this process.
    """
    if launcher == "torchrun" and not under_torchrun():
        raise UserError("--launcher torchrun: RANK and WORLD_SIZE are not in the environment; start with torchrun")
    if launcher in ("local", "ray") and under_torchrun():
        raise UserError(
            f"--launcher {launcher}: another launcher started this process as a rank; unset RANK, WORLD_SIZE"
        )
    if launcher == "ray" and given != Hosts():
        raise UserError("--nnodes: with --launcher ray the nodes are those of cluster.nodes; start one command")
    is_slurm = launcher == "auto" and given.nnodes == 1 and not under_torchrun() and is_several_nodes(environment)
    return slurm_hosts(environment, given.rdzv_endpoint) if launcher == "slurm" or is_slurm else given


def slurm_hosts(environment: Mapping[str, str], rdzv_endpoint: str = "") -> Hosts:
    """Return the nodes of the step that this process is a task of.

    ``rdzv_endpoint``: HOST:PORT of node 0; without it a port that follows from the job on the step's first node.
    Raises UserError outside a step, and unless every node has one task.
    """
    if STEP not in environment:
        raise UserError(f"--launcher slurm: {STEP} missing from the environment; start with srun, a task a node")
    nodes, tasks = (_number(environment, name) for name in ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"))
    if tasks != nodes:
        raise UserError(
            f"srun: {tasks} tasks on {nodes} nodes; a task starts all ranks of its node: use --ntasks-per-node=1"
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


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(f"{name}: {value!r} in the environment of a task; srun sets a number")
    return int(value)
