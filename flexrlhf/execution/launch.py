"""Start the ranks of a job on this node through torch's elastic launcher, and report the rank that ended it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flexrlhf.config.spec import Spec
from flexrlhf.config.spec_file import dump_spec
from flexrlhf.errors import Interrupted, RankFailure, UserError
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan

POLL_SECONDS = 5
STOPPED = "stopped; all ranks have ended"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals for which the elastic agent installs handlers of its own."""


def choose_device(setting: str, num_local: int) -> str:
    """Return ``cpu`` or ``cuda`` for all ranks, given ``cluster.device`` and the number of ranks on this node.

    ``auto`` is CUDA when every rank of this node has a device of its own. Raises UserError for ``cuda`` with too few.
    """
    count = torch.cuda.device_count()
    if setting == "cuda" and count < num_local:
        raise UserError(f"cluster.device: cuda needs {num_local} CUDA devices on this node, found {count}; use cpu")
    if setting == "auto" and 0 < count < num_local:
        print(f"flexrlhf: {num_local} ranks but {count} CUDA devices on this node: running on CPU", file=sys.stderr)
    return setting if setting != "auto" else "cuda" if count >= num_local else "cpu"


def launch(specs: Sequence[Spec], plan: Plan, hosts: Hosts) -> None:
    """Run the worker on every rank of this node and wait. Raises RankFailure or Interrupted; no process is left."""
    with TemporaryDirectory(prefix="flexrlhf-") as directory:
        file = Path(directory) / "specs.json"
        file.write_text(json.dumps([dump_spec(spec) for spec in specs]))
        start_ranks(["flexrlhf.execution.rank", str(file)], plan, hosts)


def start_ranks(module: Sequence[str], plan: Plan, hosts: Hosts) -> None:
    """Run ``module``, with its arguments, on every rank of this node and wait. Raises as ``launch`` does."""
    config = _config(hosts.num_local_ranks(plan.cluster), hosts)
    _silence_agent()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    try:
        with _signal_handlers_restored():
            elastic_launch(config, sys.executable)("-m", *module)
    except ChildFailedError as error:
        rank, failure = _cause(error)
        if failure.exitcode == -signal.SIGINT:
            raise Interrupted(STOPPED) from None
        raise RankFailure(_sentence(rank, failure, plan)) from None
    except (SignalException, KeyboardInterrupt):
        raise Interrupted(STOPPED) from None


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the signal handlers of the calling script, which continues after its ranks have ended."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        # other threads may not set handlers, and the agent sets none there
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _cause(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank that failed by itself, not one that waited for it in vain or that the agent ended afterwards."""
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
    """Silence the agent's log: three paragraphs for each rank, which repeat the closing sentence."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _config(num_local: int, hosts: Hosts) -> LaunchConfig:
    several = hosts.nnodes > 1
    return LaunchConfig(
        min_nodes=hosts.nnodes,
        max_nodes=hosts.nnodes,
        nproc_per_node=num_local,
        run_id="flexrlhf" if several else f"flexrlhf-{os.getpid()}",
        role="rank",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=hosts.rdzv_endpoint or "localhost:0",
        rdzv_configs={"rank": hosts.node_rank, "timeout": 900} if several else {"is_host": True},
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
    # a rank that a signal killed has left no message of its own
    reason = str(message).strip().splitlines()[0] if failure.error_file_data and failure.exitcode > 0 else ""
    detail = f": {reason}" if reason else ""
    return f"rank {rank} ({models}) ended the run, {_exit(failure)}{detail}"


def _exit(failure: ProcessFailure) -> str:
    return f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
