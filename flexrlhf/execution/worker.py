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
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from flexrlhf.checkpoints.manifest import checkpoints_of
from flexrlhf.comm.world import World, open_world
from flexrlhf.config.spec import Spec
from flexrlhf.errors import RunStopped, UserError
from flexrlhf.execution.agreement import Member, agree
from flexrlhf.execution.failures import ErrorReport
from flexrlhf.execution.flight_record import FlightRecord
from flexrlhf.execution.hub_commits import check_commits
from flexrlhf.execution.launchers.job_start import JobStart
from flexrlhf.execution.memory_meter import MemoryMeter
from flexrlhf.execution.rank_watch import RankWatch
from flexrlhf.execution.run_directory import RunStatus, read_status, write_status, writing_to
from flexrlhf.execution.run_order import RunOrder, load_orders
from flexrlhf.execution.starting_point import choose_start
from flexrlhf.execution.stop_requests import StopRequests
from flexrlhf.execution.trainer import Trainer
from flexrlhf.plan.data_lines import data_line, data_warnings
from flexrlhf.plan.data_sources import data_sources
from flexrlhf.plan.inputs import RunData, load_run_data
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan


def work(orders: Sequence[RunOrder], stop_file: Path | None = None, begin: JobStart | None = None) -> bool:
    """Execute runs in order on this rank; all runs of a command share the job's ranks.

    Returns whether all have finished; else a request has stopped them.

    stop_file:  exists once the launcher has received a signal to save and end; None: signals come to this process.
    begin:      of a job without a launcher of ours: its ranks agree by themselves before anything is written.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    timeout_seconds = max(order.spec.timeout_seconds for order in orders)
    with (
        open_world(orders[0].spec.cluster.device, orders[0].spec.timeout_seconds) as world,
        RankWatch(world, timeout_seconds, stop_file) as watch,
        ExitStack() as stack,
    ):
        meter, stops = MemoryMeter(world.device), StopRequests(world.store, stop_file)
        stack.enter_context(nullcontext() if begin is None else _agreed(begin, world))
        if stop_file is None:
            stops.install_handlers()
        for order in orders:
            # between runs most objects are those of libraries: a run's collections of garbage need not search them
            gc.collect()
            gc.freeze()
            next_step = order.spec.steps if _is_done(order.spec) else _run(order, world, meter, stops, watch)
            # the next run may read what a rank of this one has just written
            world.meet(f"the end of {order.spec.name}", order.spec.timeout_seconds)
            if next_step < order.spec.steps:
                return False
    return True


@contextmanager
def _agreed(job: JobStart, world: World) -> Iterator[None]:
    """Make the directories of the runs, on rank 0, once all machines agree. One rank of each machine compares."""
    store, seconds = dist.PrefixStore("agreement", world.store), job.plans[0].spec.timeout_seconds
    compares = world.rank == 0 or os.environ.get("LOCAL_RANK", "0") == "0"
    member = Member(world.rank, world.size, world.host, "rank")
    agree(store, member, job.plans, job.make_terms if compares else None, seconds)
    with job.directories():
        world.meet("the directories of the runs", seconds)
        yield


def _run(order: RunOrder, world: World, meter: MemoryMeter, stops: StopRequests, watch: RankWatch) -> int:
    """Plan and execute one run; afterwards nothing refers to its trainer. Returns the step that it has come to."""
    if is_restarted():
        order = replace(order, candidates=(*checkpoints_of(order.spec.directory), *order.candidates))
    plan = make_plan(order.spec)
    flight = FlightRecord(plan, world, plan.spec.directory)
    with watch.over(flight), writing_to(plan.spec.directory):
        data = load_run_data(plan)
        check_commits(plan, world)
        if world.rank == 0:
            _print_counts(plan, data)
        start = choose_start(plan, world, data, order.candidates)
        trainer = Trainer(plan, world, data, meter, stops, flight, start)
        next_step = trainer.run()
        trainer.close()
    if world.rank == 0:
        is_finished = next_step == plan.spec.steps
        status = RunStatus("finished" if is_finished else "stopped", next_step, plan.spec.steps)
        with writing_to(plan.spec.directory):
            write_status(plan.spec.directory, status)
    return next_step


def _print_counts(plan: Plan, data: RunData) -> None:
    """Print what the limits do to the rows of each data file."""
    for source in data_sources(plan):
        print(f"{plan.spec.name}: {data_line(source, data.counts[source.key])}", flush=True)
        for warning in data_warnings(source, data.counts[source.key]):
            print(f"flexrlhf: {plan.spec.name}: {warning}", file=sys.stderr, flush=True)


def is_restarted() -> bool:
    """Return whether the elastic agent has started this rank again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _is_done(spec: Spec) -> bool:
    """Return whether an attempt before this one has finished the run."""
    status = read_status(spec.directory) if is_restarted() else None
    return status is not None and status.state == "finished"


def main(orders_file: str, stop_file: str) -> None:
    """Execute the runs of a file of orders; ``launch`` reports an error by its first line."""
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
        work(load_orders(Path(orders_file).read_text()), Path(stop_file))


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, except for errors that the launcher prints as one sentence."""
    if not issubclass(kind, UserError | RunStopped):
        sys.__excepthook__(kind, error, trace)
