"""Environment of a rank: torchrun's variables, and those of the driver of Ray's ranks that concern a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREFIXES = (
    "FLEXRLHF_",
    "OMP_",
    "MKL_",
    "TORCH_",
    "GLOO_",
    "NCCL_",
    "HF_",
    "WANDB_",
    "MLFLOW_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "VLLM_",
    "DS_",
    "PYTORCH_",
    "CUDA_LAUNCH_",
)
"""Beginnings of the driver's variables that all ranks get."""
NAMES = ("PYTHONPATH", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONWARNINGS")


@dataclass(frozen=True)
class RankPlace:
    """Position of a rank among the others.

    rank:          number in the job.
    size:          number of ranks.
    local_rank:    number among the ranks of its planned node.
    local_size:    number of these.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Meeting:
    """One attempt to run the ranks.

    address, port:  of the job's store, which rank 0 serves.
    attempt:        number of the attempt, from 0.
    max_restarts:   how often all ranks are started again.
    """

    address: str
    port: int
    attempt: int
    max_restarts: int


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that its actors, and so its ranks, get."""
    return {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}


def rank_variables(place: RankPlace, meeting: Meeting, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a rank. ``gpus``: of its planned node by local rank; empty on CPUs.

    Every rank sees all GPUs of its planned node and takes its own by LOCAL_RANK, as under torchrun.
    """
    variables = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_size,
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": meeting.port,
        "TORCHELASTIC_RESTART_COUNT": meeting.attempt,
        "TORCHELASTIC_MAX_RESTARTS": meeting.max_restarts,
    }
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {name: str(value) for name, value in variables.items()} | visible


def child_environment(variables: Mapping[str, str], launcher: str, error_file: str) -> dict[str, str]:
    """Return the environment of a rank's process. ``launcher``, ``error_file``: names of variables with their values
    are those of ``launch/lifetime.py`` and of torch's elastic agent."""
    return {**os.environ, **variables, "FLEXRLHF_LAUNCHER": launcher, "TORCHELASTIC_ERROR_FILE": error_file}
