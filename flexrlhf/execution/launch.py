"""Start the ranks of a command on this machine through torch's elastic launcher, and say which rank ended it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import UserError
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan

POLL_SECONDS = 5
STOPPED = "stopped; all ranks have ended"


class RankFailure(RuntimeError):
    """A rank ended the run; the message names it."""


class Interrupted(RuntimeError):
    """The run was stopped by a signal."""


def num_local_ranks(plan: Plan) -> int:
    """Ranks on this machine under torchrun, which must have started as many in all as the plan has."""
    size = int(os.environ["WORLD_SIZE"])
    if size != plan.placement.num_ranks:
        raise UserError(
            f"cluster: {plan.placement.num_ranks} devices planned, but torchrun started {size} ranks; "
            f"use --devices {size} or --nproc-per-node {plan.placement.num_ranks}"
        )
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


def settle_device(wanted: str, num_local: int) -> str:
    """``cpu`` or ``cuda`` for all ranks: auto takes CUDA when every rank of this machine has a device of its own."""
    found = torch.cuda.device_count()
    if wanted == "cuda" and found < num_local:
        raise UserError(f"cluster.device: cuda needs {num_local} CUDA devices on this machine, found {found}; use cpu")
    if wanted == "auto" and 0 < found < num_local:
        print(f"flexrlhf: {num_local} ranks but {found} CUDA devices on this machine: running on CPU", file=sys.stderr)
    return wanted if wanted != "auto" else "cuda" if found >= num_local else "cpu"


def is_first_rank() -> bool:
    return os.environ.get("RANK") == "0"


def launch(specs: Sequence[Spec], plan: Plan, machines: Hosts) -> None:
    """Run the worker on every rank of this machine and wait. Raises RankFailure or Interrupted; no process is left."""
    with TemporaryDirectory(prefix="flexrlhf-") as directory:
        file = Path(directory) / "specs.json"
        file.write_text(json.dumps([dump_spec(spec) for spec in specs]))
        start_ranks(["flexrlhf.execution.rank", str(file)], plan, machines)


def start_ranks(module: Sequence[str], plan: Plan, machines: Hosts) -> None:
    """Run ``module``, with its arguments, on every rank of this machine and wait; as ``launch``."""
    config = _config(machines.num_ranks(plan.cluster), machines)
    _silence_agent()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    try:
        elastic_launch(config, sys.executable)("-m", *module)
    except ChildFailedError as error:
        rank, failure = _cause(error)
        if failure.exitcode == -signal.SIGINT:
            raise Interrupted(STOPPED) from None
        raise RankFailure(_sentence(rank, failure, plan)) from None
    except (SignalException, KeyboardInterrupt):
        raise Interrupted(STOPPED) from None


def _cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that died of itself rather than one that waited for it in vain or that the agent ended afterwards."""
    first = error.get_first_failure()
    # the agent notices a killed rank at its next poll, a neighbour at once; its own SIGKILL comes half a minute later
    latest = first[1].timestamp + POLL_SECONDS
    killed = [
        (rank, failure)
        for rank, failure in error.failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and failure.timestamp <= latest
    ]
    return killed[0] if killed else first


def _silence_agent() -> None:
    """The agent logs what the closing sentence says, in three paragraphs for each rank."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _config(per_node: int, machines: Hosts) -> LaunchConfig:
    several = machines.nnodes > 1
    return LaunchConfig(
        min_nodes=machines.nnodes,
        max_nodes=machines.nnodes,
        nproc_per_node=per_node,
        run_id="flexrlhf" if several else f"flexrlhf-{os.getpid()}",
        role="rank",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=machines.endpoint or "localhost:0",
        rdzv_configs={"rank": machines.node_rank, "timeout": 900} if several else {"is_host": True},
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        local_addr=None if several else "localhost",
    )


def _sentence(rank: int, failure: ProcessFailure, plan: Plan) -> str:
    models = ", ".join(model.name for model in plan.placement.on_rank(rank)) or "no model"
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    # a rank that a signal killed has nothing to say but the signal
    reason = str(message).strip().splitlines()[0] if failure.error_file_data and failure.exitcode > 0 else ""
    detail = f": {reason}" if reason else ""
    return f"rank {rank} ({models}) ended the run, {_exit(failure)}{detail}"


def _exit(failure: ProcessFailure) -> str:
    return f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
