"""Start the ranks of a job on this node through torch's elastic launcher, and report the rank that ended it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from flexrlhf.errors import Interrupted, RankFailure, UserError
from flexrlhf.execution.run_order import RunOrder, dump_orders
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan

POLL_SECONDS = 5
STOPPED = "stopped; all ranks have ended"
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals for which the elastic agent installs handlers of its own."""


SAVING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of schedulers before they end a job."""


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


def launch(orders: Sequence[RunOrder], plan: Plan, hosts: Hosts) -> bool:
    """Run the worker on every rank of this node and wait. Raises RankFailure or Interrupted; no process is left.

    Returns whether a signal has made the ranks save and end.
    """
    with TemporaryDirectory(prefix="flexrlhf-") as directory:
        file, stop = Path(directory) / "orders.json", Path(directory) / "stop"
        file.write_text(dump_orders(orders))
        saves = all(order.spec.checkpoint.on_signal for order in orders)
        with _saving_on_signals(stop, saves):
            start_ranks(["flexrlhf.execution.rank", str(file), str(stop)], plan, hosts, SAVING if saves else ())
        return stop.exists()


@contextmanager
def _saving_on_signals(stop: Path, is_enabled: bool) -> Iterator[None]:
    """Make the first signal of ``SAVING`` create the file ``stop``; a second SIGTERM ends the ranks at once."""
    if not is_enabled or threading.current_thread() is not threading.main_thread():
        yield
        return

    def request(number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM and stop.exists():
            raise SignalException("ended by a second SIGTERM", signal.SIGTERM)
        stop.touch()

    before = {number: signal.signal(number, request) for number in SAVING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_ranks(module: Sequence[str], plan: Plan, hosts: Hosts, others_signals: Sequence[signal.Signals] = ()) -> None:
    """Run ``module``, with its arguments, on every rank of this node and wait. Raises as ``launch`` does.

    ``others_signals``: those that the caller handles, all others end the ranks.
    """
    ending = [number.name for number in HANDLED if number not in others_signals]
    config = replace(_config(hosts.num_local_ranks(plan.cluster), hosts), signals_to_handle=",".join(ending))
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
