"""Start the ranks of a job on this node through torch's elastic launcher, and report the rank that ended it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from socket import gethostname
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing.api import SignalException

from flexrlhf.display.live_display import live_display
from flexrlhf.errors import Interrupted, Preempted, RankFailure, RunStopped
from flexrlhf.launch.agent import RankAgent
from flexrlhf.launch.failures import Failure, FailureReporter
from flexrlhf.launch.job import Watch
from flexrlhf.launch.lifetime import LAUNCHER, changed_environment
from flexrlhf.launch.node_watch import NodeWatch
from flexrlhf.launch.rank_factory import RankFactory
from flexrlhf.launch.rank_watch import silence_limit
from flexrlhf.launch.rendezvous import NodeRendezvous
from flexrlhf.launch.shared_directories import OWN, SHARED
from flexrlhf.placement.hosts import Hosts
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.signals import Ending, StopSignal, handled
from flexrlhf.text import counted
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.user_code.process_directories import process_directory

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Signals for which the elastic agent installs handlers of its own: none."""


def launch(
    orders: Sequence[RunOrder],
    plan: Plan,
    hosts: Hosts,
    max_restarts: int = 0,
    rendezvous: NodeRendezvous | None = None,
    shares: bool = True,
    factory: RankFactory | None = None,
    watch: Watch = nullcontext,
) -> bool:
    """Run the worker on every rank of this node and wait. Raises RankFailure or Interrupted; no process is left.

    Returns whether a request has made the ranks save and end.

    max_restarts:  attempts after the first.
    rendezvous:    of several machines; None: this one alone.
    shares:        whether this machine mounts the directories of rank 0's.
    factory:       process that forks the ranks, if it has been started before; None: this call starts one.
    watch:         context that is open while the ranks run.
    """
    directories = [order.spec.directory for order in orders]
    with process_directory() as directory:
        file, stop, events = (directory / name for name in ("orders.json", "stop", "events.jsonl"))
        file.write_bytes(RunOrder.to_json(orders).encode())
        saves = all(order.spec.checkpoint.on_signal for order in orders)
        with saving_on_signals(stop, saves), watch(stop):
            ranks = ["flexrlhf.launch.rank", str(file), str(stop), SHARED if shares else OWN]
            with _displayed(events, plan, hosts) as further:
                ranks += further
                start_ranks(ranks, plan, hosts, directories, max_restarts, rendezvous, factory)
        if not stop.exists():
            _check_ended(orders)
        # a request after the last step has come too late to stop anything
        return stop.exists() and any(_state(order) != "finished" for order in orders)


def _state(order: RunOrder) -> str:
    """Return the state of a run by its directory; empty without one."""
    status = RunDirectory(order.spec.directory).status
    return "" if status is None else status.state


def _check_ended(orders: Sequence[RunOrder]) -> None:
    """Raise RankFailure for a run that its ranks have not ended, though they report no error."""
    for order in orders:
        if _state(order) == "running":
            raise RankFailure(
                f"the ranks of {order.spec.name} ended in its middle with exit code 0: code of yours that they load, "
                f"such as a loss or algorithm.loop, ends its process"
            )


@contextmanager
def _displayed(events: Path, plan: Plan, hosts: Hosts) -> Iterator[list[str]]:
    """Show the runs on the terminal of the first node; yield the further arguments of the ranks for it."""
    what = f"starting {counted(plan.placement.num_ranks, 'rank')}"
    if not hosts.is_first_node:
        yield []
        return
    with live_display(events, what) as is_shown:
        if not is_shown:
            print(what, flush=True)
        yield [str(events)] if is_shown else []


@contextmanager
def saving_on_signals(stop: Path, is_enabled: bool) -> Iterator[None]:
    """Make the first signal of ``StopSignal.SAVING`` create the file ``stop``, if it ``is_enabled``.

    A second SIGTERM, and every other signal, ends the ranks at once.
    """
    Ending.check_stopped()
    end, silence_command = Ending(_end_of_ranks), Ending.silencer()

    def request(number: int, frame: FrameType | None) -> None:
        silence_command()
        if not is_enabled or number not in StopSignal.SAVING:
            end(number, frame)
        elif not stop.exists() or stop.read_text() == StopRequests.REPLAN:
            stop.write_text("")
        elif number == signal.SIGTERM:
            stop.write_text(StopRequests.END_NOW)
            end(number, frame)

    with handled(request):
        yield


def _end_of_ranks(number: int) -> SignalException:
    """Return the error by which the agent ends the ranks, with SIGTERM or SIGINT, which all of them handle."""
    how = signal.SIGTERM if number == signal.SIGTERM else signal.SIGINT
    return SignalException(signal.Signals(number).name, how)


def start_ranks(
    module: Sequence[str],
    plan: Plan,
    hosts: Hosts,
    directories: Sequence[Path] = (),
    max_restarts: int = 0,
    rendezvous: NodeRendezvous | None = None,
    factory: RankFactory | None = None,
) -> None:
    """Run ``module``, with its arguments, on every rank of this node and wait. Raises as ``launch`` does.

    directories:     of the runs, in order; the one of the run that fails gets the records of its ranks.
    max_restarts:    how often all ranks are started again after one has failed.
    rendezvous:      of the launchers; None: one that waits as long as a run does.
    factory:         of the caller, that may have been started before; None: one of this call.
    """
    _silence_agent()
    reporter = FailureReporter(plan, directories, hosts.local_ranks(plan.cluster))
    rendezvous = rendezvous or NodeRendezvous(hosts)
    spec = WorkerSpec(
        role="rank",
        local_world_size=hosts.num_local_ranks(plan.cluster),
        entrypoint=module[0],
        args=tuple(module[1:]),
        rdzv_handler=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=0.2,
    )
    silence = silence_limit(plan.spec.timeout_seconds)
    with process_directory() as log_directory, ExitStack() as stack:
        agent = RankAgent(
            spec,
            rendezvous,
            factory or stack.enter_context(RankFactory()),
            str(log_directory),
            lambda store: NodeWatch(store, hosts.node_rank, _node_names(store, plan, hosts), silence),
            reporter.report,
        )
        with changed_environment({LAUNCHER: str(os.getpid()), SIGNALS_VARIABLE: ""}):
            _run_agent(agent, hosts, reporter)


def run_on_ranks(
    module: Sequence[str],
    plan: Plan,
    hosts: Hosts,
    rendezvous: NodeRendezvous | None = None,
    factory: RankFactory | None = None,
) -> None:
    """Start ranks as ``start_ranks`` does, for a command that trains nothing: every signal ends them at once."""
    with handled(Ending(_end_of_ranks)):
        start_ranks(module, plan, hosts, rendezvous=rendezvous, factory=factory)


def _run_agent(agent: RankAgent, hosts: Hosts, reporter: FailureReporter) -> None:
    """Run the ranks to their end. Raises as ``launch`` does."""
    try:
        result = agent.run()
    except (SignalException, KeyboardInterrupt) as error:
        agent.close(Failure("user", f"node {hosts.node_rank} (host {gethostname()}) was stopped", time.time()))
        reporter.report({})
        if isinstance(error, StopSignal):
            # it has waited for the other machines, not for ranks
            raise end_between_attempts(error, agent.cause.sentence) if agent.cause else error from None
        is_named = str(error) not in ("", signal.SIGINT.name)
        raise (Interrupted(f"stopped by {error}; all ranks have ended") if is_named else Interrupted()) from None
    except RunStopped as error:
        raise RankFailure(str(error)) from None
    agent.close()
    if result.is_failed():
        _raise(agent.cause, result, reporter)


def end_between_attempts(stop: StopSignal, failure: str) -> Exception:
    """Return the end of a job by a signal after a ``failure``, before its ranks were started again."""
    kind = Preempted if stop.number in StopSignal.SAVING else Interrupted
    return kind(StopSignal.sentence(stop.number, f"before the ranks were started again ({failure}); --resume goes on"))


def _raise(cause: Failure | None, result: RunResult, reporter: FailureReporter) -> None:
    """Raise the end of a job, with where this machine was when another one failed, and the place of its records."""
    if any(failure.exitcode == -signal.SIGINT for failure in result.failures.values()):
        raise Interrupted
    assert cause is not None, "an attempt that failed has a cause"
    place = reporter.place() if cause.kind == "node" else ""
    record = f"record: {reporter.record}" if reporter.record is not None else ""
    raise RankFailure("; ".join(filter(None, (cause.sentence, place, record))), is_final=cause.kind == "user")


def _node_names(store: dist.Store, plan: Plan, hosts: Hosts) -> list[str]:
    """Return names of all nodes: number, host and ranks."""
    names = []
    for node in range(hosts.nnodes):
        ranks = ", ".join(map(str, plan.cluster.ranks_on_node(node))) if hosts.nnodes > 1 else ""
        names.append(f"node {node} (host {store.get(f'node/{node}').decode()}; ranks {ranks})")
    return names


def _silence_agent() -> None:
    """Silence the agent's log: three paragraphs for each rank, which repeat the closing sentence."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
