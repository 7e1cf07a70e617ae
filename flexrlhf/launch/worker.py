"""One rank: join the job, then execute its runs one after another.

Started by ``launch`` through torch's elastic agent, or by torchrun. Every rank makes the plan again; it is a pure
function of the spec.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World, open_world
from flexrlhf.config.job_secret import JobSecret
from flexrlhf.display.events import EventSender
from flexrlhf.display.plain_lines import open_events
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.launch.failures import ErrorReport
from flexrlhf.launch.joined_rank import limit_threads
from flexrlhf.launch.rank_watch import RankWatch
from flexrlhf.launch.shared_directories import OWN
from flexrlhf.plan.pipeline import make_plans
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.trainer.memory_meter import naming_exhaustion
from flexrlhf.trainer.rank_runs import RankRuns
from flexrlhf.trainer.stop_requests import StopRequests


def work(
    orders: Sequence[RunOrder],
    stop_file: Path | None = None,
    begin: Callable[[World], AbstractContextManager[bool]] | None = None,
    shares: bool = True,
    events_file: Path | None = None,
    launched: float | None = None,
) -> bool:
    """Execute runs in order on this rank; all runs of a command share the job's ranks.

    Returns whether all have finished, a program's as soon as that ends it; else a request has stopped them.

    stop_file:    exists once the launcher has received a signal to save and end; None: signals come to this process.
    begin:        makes the ranks agree before anything is written, in a job without a launcher of ours; yields
                  ``shares``.
    shares:       whether this machine mounts the directories of rank 0's; without ``begin``.
    events_file:  that the launcher displays; None: rank 0 prints plain lines.
    launched:     when the launcher began to start this rank, in seconds since the epoch; None: now.
    """
    launched = launched or time.time()
    limit_threads()
    first, timeout_seconds = orders[0].spec, max(order.spec.timeout_seconds for order in orders)
    if any(order.spec.debug.deterministic for order in orders):
        # read when cuBLAS starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with (
        naming_exhaustion("outside the steps"),
        open_world(first.cluster.device, first.timeout_seconds, partial(needs_one_queue, orders)) as world,
        RankWatch(world, timeout_seconds, stop_file) as watch,
        ExitStack() as stack,
    ):
        stops = StopRequests(world.store, stop_file)
        if begin is not None:
            shares = stack.enter_context(begin(world))
            orders = _orders_of_first(orders, world, timeout_seconds)
        files = stack.enter_context(RunFiles.open(world, orders, shares, timeout_seconds))
        events = open_events(events_file) if world.rank == 0 else EventSender()
        runs = RankRuns(world, files, stops, watch.over, events, time.time() - launched)
        if stop_file is None:
            stops.install_handlers()
        for index, order in enumerate(orders):
            # between runs most objects are of libraries: a run's collections of garbage need not search them
            gc.collect()
            gc.freeze()
            earlier = [each.spec.directory for each in orders[:index]]
            order, is_finished = _continued(order, world)
            next_step = order.spec.steps if is_finished else runs.execute(order, earlier)
            # the next run may read a file that a rank of this one has just written
            world.meet(f"the end of {order.spec.name}", order.spec.timeout_seconds)
            files.clear(order.spec.directory)
            if next_step < order.spec.steps:
                # a program ends where it likes
                return bool(order.program) and not stops.is_requested()
    return True


def needs_one_queue(orders: Sequence[RunOrder], rank: int) -> bool:
    """Return whether the GPU of ``rank`` needs one hardware queue, which all runs of a process then have."""
    models = (model for plan in make_plans([each.spec for each in orders]) for model in plan.placement.on_rank(rank))
    return any(model.facts.one_queue and model.layout.dims.tp > 1 for model in models)


def _orders_of_first(orders: Sequence[RunOrder], world: World, seconds: float) -> Sequence[RunOrder]:
    """Return rank 0's orders: a machine with directories of its own has not found the checkpoints."""
    if world.rank == 0:
        world.store.set("orders", JobSecret.here().signed("orders", RunOrder.to_json(orders)))
        return orders
    world.wait_for(world.store, {"orders": "rank 0"}, "the orders of rank 0", seconds)
    return RunOrder.from_json(JobSecret.here().verified("orders", world.store.get("orders").decode()))


def _continued(order: RunOrder, world: World) -> tuple[RunOrder, bool]:
    """Return an order with the checkpoints of earlier attempts, and whether they have come to its end.

    All ranks call this; rank 0 looks into the directory of the run.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return order, False
    spec, directory = order.spec, RunDirectory(order.spec.directory)
    mailbox = Mailbox(world, f"found/{spec.name}", spec.timeout_seconds)
    if world.rank == 0:
        status = directory.status
        is_finished = status is not None and status.state == "finished"
        mailbox.publish("found", [is_finished, list(map(str, directory.checkpoints))])
    is_finished, names = mailbox.receive("found", "rank 0", f"what is there of {spec.name}")
    return replace(order, candidates=(*map(Path, names), *order.candidates)), is_finished


def main(orders_file: str, stop_file: str, directories: str, events_file: str = "") -> None:
    """Execute the runs of a file of orders; ``launch`` reports an error by its first line.

    ``directories``: ``own`` if this machine does not mount rank 0's. ``events_file``: for the launcher, which
    displays it; empty: rank 0 prints plain lines.
    """
    # Ctrl-C reaches every process of the terminal; a rank that waits inside a collective could not handle it in Python
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = _print_traceback
    # extensions report objects that are frozen at the exit as leaks
    atexit.register(gc.unfreeze)
    # FSDP2 and DeepSpeed use names of torch that it has renamed: nothing that a user could correct
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # schedulers signal every process; the launcher makes one request of it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    faulthandler.enable(all_threads=True)
    with ErrorReport():
        events = Path(events_file) if events_file else None
        shares, stop, orders = directories != OWN, Path(stop_file), RunOrder.from_json(Path(orders_file).read_text())
        # the launcher writes the orders when it begins; a further attempt begins now
        is_first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0
        launched = Path(orders_file).stat().st_mtime if is_first else None
        if not work(orders, stop, shares=shares, events_file=events, launched=launched):
            # the request may have come to another machine
            stop.touch()


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, except for errors that the launcher prints as one sentence."""
    if not issubclass(kind, UserError | RunStopped):
        sys.__excepthook__(kind, error, trace)
