"""The machines of a job: what --nnodes, --node-rank and --rdzv-endpoint mean, checked before anything is written."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.placement.cluster import Cluster


@dataclass(frozen=True)
class Hosts:
    """``nnodes`` machines of which this is number ``node_rank``; they meet at ``endpoint`` (HOST:PORT of number 0)."""

    nnodes: int = 1
    node_rank: int = 0
    endpoint: str = ""

    def check(self) -> None:
        if self.node_rank >= self.nnodes:
            raise UserError(
                f"--node-rank {self.node_rank}: with --nnodes {self.nnodes} it is at most {self.nnodes - 1}"
            )
        if self.nnodes == 1:
            return
        if not self.endpoint:
            raise UserError("--rdzv-endpoint: missing; several machines need HOST:PORT of machine 0")
        if not re.fullmatch(r"[^:\s]+:\d+", self.endpoint):
            raise UserError(
                f"--rdzv-endpoint {self.endpoint}: expected HOST:PORT, such as {self.endpoint.split(':')[0]}:29500"
            )

    def num_ranks(self, cluster: Cluster) -> int:
        """Ranks to start on this machine: all of them, or with several machines those of the cluster's node."""
        if self.nnodes == 1:
            return len(cluster.devices)
        if cluster.num_nodes != self.nnodes:
            raise UserError(f"--nnodes {self.nnodes}: cluster.nodes has {cluster.num_nodes}; they must agree")
        return len(cluster.ranks_on_node(self.node_rank))


def under_torchrun() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def equal_nodes(devices: int, nnodes: int) -> str:
    """``cluster.nodes`` for a cluster that was given as one number."""
    if devices % nnodes:
        raise UserError(
            f"--nnodes {nnodes} does not divide the {devices} devices of the cluster; "
            f"list its machines in cluster.nodes"
        )
    return f"[{{count: {nnodes}, devices: {devices // nnodes}}}]"


def with_device(spec: Spec, device: str) -> Spec:
    """The spec for ranks that are told whether they compute on cpu or cuda."""
    return spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"device": device})})
