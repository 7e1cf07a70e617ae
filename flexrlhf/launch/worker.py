"""One rank: join the job, then execute its runs one after another.

Started by ``launch`` through torch's elastic agent, or by torchrun. Every rank makes the plan again; it is a pure
function of the spec.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World, many_queues, open_world
from flexrlhf.config.job_secret import signed, verified
from flexrlhf.config.output_settings import DebugSpec
from flexrlhf.display.events import Doing, EventFile, Note, RunBegins, RunEnds, Send, discard
from flexrlhf.display.plain_lines import print_plainly
from flexrlhf.errors import RunStopped, UserError, one_line
from flexrlhf.launch.failures import ErrorReport
from flexrlhf.launch.rank_watch import RankWatch
from flexrlhf.launch.run_header import run_title, where_models_are
from flexrlhf.placement.protocols import PURE
from flexrlhf.plan.data_report import data_line, data_warnings, unread_line
from flexrlhf.plan.hub_names import commits
from flexrlhf.plan.operator_protocols import PROTOCOLS, own_splits
from flexrlhf.plan.pipeline import make_plan, make_plans
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData, data_sources, load_run_data
from flexrlhf.runs.resume import ORDERS, OWN, RunOrder
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles, open_run_files
from flexrlhf.trainer.call_feed import CallFeed
from flexrlhf.trainer.called_steps import CalledSteps, CalledTrainer
from flexrlhf.trainer.flight_record import FlightRecord
from flexrlhf.trainer.memory_meter import MemoryMeter, naming_exhaustion, use_expandable_segments
from flexrlhf.trainer.rank_context import RankContext, open_rank
from flexrlhf.trainer.restoration import StartingPoint, choose_start
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.trainer.trainer import Trainer


def work(
    orders: Sequence[RunOrder],
    stop_file: Path | None = None,
    begin: Callable[[World], AbstractContextManager[bool]] | None = None,
    shares: bool = True,
    events_file: Path | None = None,
    launched: float | None = None,
) -> bool:
    """Execute runs in order on this rank; all runs of a command share the job's ranks.

    Returns whether all have finished; else a request has stopped them.

    stop_file:    exists once the launcher has received a signal to save and end; None: signals come to this process.
    begin:        makes the ranks agree before anything is written, in a job without a launcher of ours; yields
                  ``shares``.
    shares:       whether this machine mounts the directories of rank 0's; without ``begin``.
    events_file:  that the launcher displays; None: rank 0 prints plain lines.
    launched:     when the launcher began to start this rank, in seconds since the epoch; None: now.
    """
    launched = launched or time.time()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    first, timeout_seconds = orders[0].spec, max(order.spec.timeout_seconds for order in orders)
    if any(order.spec.debug.deterministic for order in orders):
        # read when cuBLAS starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with (
        naming_exhaustion("outside the steps"),
        open_world(first.cluster.device, first.timeout_seconds, partial(device_queues, orders)) as world,
        RankWatch(world, timeout_seconds, stop_file) as watch,
        ExitStack() as stack,
    ):
        stops = StopRequests(world.store, stop_file)
        if begin is not None:
            shares = stack.enter_context(begin(world))
            orders = _orders_of_first(orders, world, timeout_seconds)
        files = stack.enter_context(open_run_files(world, orders, shares, timeout_seconds))
        send: Send = discard
        if world.rank == 0:
            send = print_plainly() if events_file is None else EventFile(events_file)
        rank = _Rank(world, files, MemoryMeter(world.device), stops, watch, send, time.time() - launched)
        if stop_file is None:
            stops.install_handlers()
        for index, order in enumerate(orders):
            # between runs most objects are of libraries: a run's collections of garbage need not search them
            gc.collect()
            gc.freeze()
            earlier = [each.spec.directory for each in orders[:index]]
            order, is_finished = _continued(order, world)
            next_step = order.spec.steps if is_finished else _run(order, earlier, rank)
            # the next run may read a file that a rank of this one has just written
            world.meet(f"the end of {order.spec.name}", order.spec.timeout_seconds)
            files.clear(order.spec.directory)
            if next_step < order.spec.steps:
                return False
    return True


def device_queues(orders: Sequence[RunOrder], rank: int) -> int:
    """Return the hardware queues of the GPU of ``rank``, which are the same in all runs of a process."""
    models = (model for plan in make_plans([each.spec for each in orders]) for model in plan.placement.on_rank(rank))
    needs_one = any(model.facts.one_queue and model.layout.tp > 1 for model in models)
    return 1 if needs_one else many_queues(rank)


def _orders_of_first(orders: Sequence[RunOrder], world: World, seconds: float) -> Sequence[RunOrder]:
    """Return rank 0's orders: a machine with directories of its own has not found the checkpoints."""
    if world.rank == 0:
        world.store.set("orders", signed("orders", ORDERS.dump_json(orders).decode()))
        return orders
    world.wait_for(world.store, {"orders": "rank 0"}, "the orders of rank 0", seconds)
    return ORDERS.validate_json(verified("orders", world.store.get("orders").decode()))


@dataclass(frozen=True)
class _Rank:
    """Parts of a rank that all its runs share. ``join_seconds``: time until it had joined the others."""

    world: World
    files: RunFiles
    meter: MemoryMeter
    stops: StopRequests
    watch: RankWatch
    send: Send
    join_seconds: float


def _run(order: RunOrder, earlier: Sequence[Path], rank: _Rank) -> int:
    """Plan and execute one run; afterwards nothing refers to its trainer. Returns the step that it has come to.

    ``earlier``: directories of the runs before it.
    """
    debug, files, began = order.spec.debug, rank.files, time.time()
    directory = RunDirectory(order.spec.directory)
    world = rank.world.under(debug)
    files.receive_inputs(order.spec, earlier, world)
    plan = make_plan(order.spec)
    name, send = plan.spec.name, rank.send
    flight = FlightRecord(plan, world, directory)
    with rank.watch.over(flight), directory.writing():
        send(RunBegins(name, run_title(plan, world.device.type), where_models_are(plan), plan.spec.steps))
        send(Doing(name, "reading the data"))
        data = load_run_data(plan)
        check_commits(plan, world)
        check_splits(plan, world)
        start = choose_start(plan, world, data, files, order.candidates)
        if world.rank == 0:
            _send_counts(plan, data, send)
        send(Doing(name, "loading the models" if start is None else f"loading the models and {start.checkpoint}"))
        choose_kernels(debug)
        if debug.expandable_segments and world.device.type == "cuda":
            use_expandable_segments()
        first = 0 if start is None else start.next_step
        opened = open_rank(plan, data, files, world, flight, rank.meter, rank.stops, send, first)
        steps = CalledSteps() if order.program else None
        trainer = Trainer(opened, start, steps)
        files.remove_received(plan, world)
        start_seconds = rank.join_seconds + time.time() - began
        if files.keeps:
            directory.write_status("running", first, plan.spec.steps, start_seconds)
        next_step = trainer.run() if steps is None else _called(order, opened, trainer, steps, start)
        opened.close()
    send(RunEnds(name, next_step))
    if files.keeps:
        is_finished = next_step == plan.spec.steps
        with directory.writing():
            directory.write_status("finished" if is_finished else "stopped", next_step, plan.spec.steps, start_seconds)
    return next_step


def choose_kernels(debug: DebugSpec) -> None:
    """Choose torch's kernels for a run."""
    torch.backends.cuda.enable_cudnn_sdp(debug.cudnn_attention)
    # as an error: with warnings alone attention would go on adding in any order
    torch.use_deterministic_algorithms(debug.deterministic)
    # all memory is written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _called(
    order: RunOrder, rank: RankContext, trainer: Trainer, steps: CalledSteps, start: StartingPoint | None
) -> int:
    """Execute the calls of a program. Returns the step that it has come to."""
    feed = CallFeed(rank.world, order.spec.name, order.program, order.spec.timeout_seconds)
    next_step = CalledTrainer(trainer, rank, steps, feed, 0 if start is None else start.next_step).run()
    feed.close()
    return next_step


def _send_counts(plan: Plan, data: RunData, send: Send) -> None:
    """Send the effect of the limits on the rows of each data file."""
    for source in data_sources(plan):
        counts = data.counts[source.key]
        for line in filter(None, (data_line(source, counts), unread_line(source, counts))):
            send(Note(plan.spec.name, line))
        for warning in data_warnings(source, counts):
            print(f"flexrlhf: {plan.spec.name}: {warning}", file=sys.stderr, flush=True)


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
        shares, stop, orders = directories != OWN, Path(stop_file), ORDERS.validate_json(Path(orders_file).read_bytes())
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


def check_commits(plan: Plan, world: World) -> None:
    """Raise UserError if this rank has another commit of a model or a data set than rank 0."""
    for setting, mine, first in _differing(plan, world, "commits", commits(plan.spec, data_sources(plan))):
        raise UserError(
            f"{setting}: rank {world.rank} (host {world.host}) has {mine} in its Hub cache, rank 0 has {first}; name "
            f"the commit, as in {first or mine}"
        )


def check_splits(plan: Plan, world: World) -> None:
    """Raise UserError if a protocol splits rows on this rank in another way than on rank 0."""
    splits = {
        f"{PROTOCOLS}.{name}": json.dumps(split) for name, split in own_splits(plan.placement, plan.batch).items()
    }
    for setting, mine, first in _differing(plan, world, "splits", splits):
        raise UserError(
            f"{setting}: rank {world.rank} (host {world.host}) splits the prompts of the mini-batches as "
            f"{one_line(mine)}, rank 0 as {one_line(str(first))}; {PURE}"
        )


def _differing(plan: Plan, world: World, what: str, mine: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each setting with its value here that rank 0 has another value of, and this one."""
    if not mine:
        return
    mailbox = Mailbox(world, f"{what}/{plan.spec.name}", plan.spec.timeout_seconds)
    if world.rank == 0:
        mailbox.publish("first", mine)
    first = mailbox.receive("first", "rank 0", f"the {what} of rank 0")
    yield from ((key, value, first.get(key)) for key, value in mine.items() if value != first.get(key))
