"""Batch script of a plan for SLURM: its nodes, a signal that saves before the time is up, and a job that goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flexrlhf.placement.cluster import Cluster
from flexrlhf.plan.plan import Plan

STOPPED = 143
"""Exit code of a run that has saved and ended on a signal."""


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes next to each other: a component of a heterogeneous job.

    count:         of nodes.
    devices:       of each node.
    device_class:  of its devices.
    """

    count: int
    devices: int
    device_class: str


def node_groups(cluster: Cluster) -> list[NodeGroup]:
    """Return the nodes of a cluster, equal ones together."""
    kinds = []
    for node in range(cluster.num_nodes):
        ranks = cluster.ranks_on_node(node)
        kinds.append((len(ranks), cluster.devices[ranks[0]].device_class))
    return [NodeGroup(len(list(same)), *kind) for kind, same in groupby(kinds)]


def slurm_script(plan: Plan, command: str, directives: Sequence[str] = (), seconds: int = 300) -> str:
    """Return the batch script of ``plan``.

    command:     ``flexrlhf run`` with its arguments.
    directives:  further options of sbatch, such as ``time=24:00:00``, for every component.
    seconds:     between the signal and the end of the job's time.
    """
    groups = node_groups(plan.cluster)
    lines = ["#!/bin/bash", f"#SBATCH --job-name={plan.spec.name}"]
    lines += [f"#SBATCH --{line}" for line in (f"signal=USR1@{seconds}", "requeue", "open-mode=append")]
    for index, group in enumerate(groups):
        lines += ["#SBATCH hetjob"] * (index > 0) + list(_component(group, plan, directives))
    parts = "" if len(groups) == 1 else f" --het-group=0-{len(groups) - 1}"
    return "\n".join(lines) + _body(f"srun{parts} {command}")


def _component(group: NodeGroup, plan: Plan, directives: Sequence[str]) -> Iterator[str]:
    """Yield the directives of equal nodes; a task starts all ranks of its node."""
    on_cpus = plan.spec.cluster.device == "cpu"
    yield f"# {group.count} x {group.devices} {group.device_class}"
    yield f"#SBATCH --nodes={group.count}"
    yield "#SBATCH --ntasks-per-node=1"
    yield f"#SBATCH --{'cpus-per-task' if on_cpus else 'gpus-per-node'}={group.devices}"
    yield from (f"#SBATCH --{directive}" for directive in directives)


def _body(step: str) -> str:
    """Return the commands of the script."""
    return f"""

{step}
code=$?
if [ $code -eq {STOPPED} ]; then
    # saved on a signal: the next job goes on from there
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
