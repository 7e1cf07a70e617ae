"""Runs of a job on one rank: from the order of each to its last step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch

from flexrlhf.comm.mailbox import Mailbox
from flexrlhf.comm.world import World
from flexrlhf.config.output_settings import DebugSpec
from flexrlhf.data.hub import HubName
from flexrlhf.display.events import EventSender
from flexrlhf.errors import UserError, one_line
from flexrlhf.placement.protocols import TransferProtocol
from flexrlhf.plan.data_report import DataReport
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.plan.run_data import RunData
from flexrlhf.runs.resume import RunOrder
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.text import counted, ranks_text, span_of
from flexrlhf.trainer.call_feed import CallFeed
from flexrlhf.trainer.called_steps import CalledTrainer
from flexrlhf.trainer.flight_record import FlightRecord
from flexrlhf.trainer.memory_meter import MemoryMeter, use_expandable_segments
from flexrlhf.trainer.open_steps import CalledSteps
from flexrlhf.trainer.rank_context import RankContext, open_rank
from flexrlhf.trainer.restoration import StartingPoint, choose_start
from flexrlhf.trainer.stop_requests import StopRequests
from flexrlhf.trainer.trainer import Trainer

Watched = Callable[[FlightRecord], AbstractContextManager[None]]
"""Makes the context in which a run is watched, whose record is kept if the body fails."""


class RankRuns:
    """Executor of runs on this rank, one after another."""

    def __init__(
        self,
        world: World,
        files: RunFiles,
        stops: StopRequests,
        watched: Watched,
        events: EventSender,
        join_seconds: float,
    ) -> None:
        """``join_seconds``: time until this rank had joined the others."""
        self._world, self._files, self._stops = world, files, stops
        self._watched, self._events, self._join_seconds = watched, events, join_seconds
        self._meter = MemoryMeter(world.device)

    def execute(self, order: RunOrder, earlier: Sequence[Path]) -> int:
        """Plan and execute one run; afterwards nothing refers to its trainer. Returns the step that it has come to.

        ``earlier``: directories of the runs before it.
        """
        debug, files, began = order.spec.debug, self._files, time.time()
        directory = RunDirectory(order.spec.directory)
        world = self._world.under(debug)
        files.receive_inputs(order.spec, earlier, world)
        plan = make_plan(order.spec)
        name, events = plan.spec.name, self._events
        flight = FlightRecord(plan, world, directory)
        with self._watched(flight), directory.writing():
            events.begin_run(name, run_title(plan, world.device.type), where_models_are(plan), plan.spec.steps)
            events.do(name, "reading the data")
            data = plan.data.load()
            check_commits(plan, world)
            check_splits(plan, world)
            start = choose_start(plan, world, data, files, order.candidates)
            if world.rank == 0:
                _send_counts(plan, data, events)
            events.do(name, "loading the models" if start is None else f"loading the models and {start.checkpoint}")
            choose_kernels(debug)
            if debug.expandable_segments and world.device.type == "cuda":
                use_expandable_segments()
            first = 0 if start is None else start.next_step
            opened = open_rank(plan, data, files, world, flight, self._meter, self._stops, events, first)
            steps = _called_steps(plan, start) if order.program else None
            trainer = Trainer(opened, start, steps)
            files.remove_received(plan, world)
            start_seconds = self._join_seconds + time.time() - began
            if files.keeps:
                directory.write_status("running", first, plan.spec.steps, start_seconds)
            next_step = trainer.run() if steps is None else _called(order, opened, trainer, steps)
            opened.close()
        events.end_run(name, next_step)
        if files.keeps:
            state: Literal["finished", "stopped"] = "finished" if next_step == plan.spec.steps else "stopped"
            with directory.writing():
                directory.write_status(state, next_step, plan.spec.steps, start_seconds)
        return next_step


def choose_kernels(debug: DebugSpec) -> None:
    """Choose torch's kernels for a run."""
    torch.backends.cuda.enable_cudnn_sdp(debug.cudnn_attention)
    # as an error: with warnings alone attention would go on adding in any order
    torch.use_deterministic_algorithms(debug.deterministic)
    # all memory is written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _called_steps(plan: Plan, start: StartingPoint | None) -> CalledSteps:
    """Return the steps of a program, with those in flight at its start."""
    return CalledSteps(plan) if start is None else CalledSteps(plan, start.run_start(plan), start.progress.calls)


def _called(order: RunOrder, rank: RankContext, trainer: Trainer, steps: CalledSteps) -> int:
    """Execute the calls of a program. Returns the step that it has come to."""
    feed = CallFeed(rank.world, order.spec.name, order.program, order.spec.timeout_seconds)
    next_step = CalledTrainer(trainer, rank, steps, feed).run()
    feed.close()
    return next_step


def _send_counts(plan: Plan, data: RunData, events: EventSender) -> None:
    """Send the effect of the limits on the rows of each data file."""
    for source in plan.data.sources:
        report = DataReport(source, data.counts[source.key])
        for line in report.lines():
            events.note(plan.spec.name, line)
        for warning in report.warnings():
            print(f"flexrlhf: {plan.spec.name}: {warning}", file=sys.stderr, flush=True)


def check_commits(plan: Plan, world: World) -> None:
    """Raise UserError if this rank has another commit of a model or a data set than rank 0."""
    for setting, mine, first in _differing(plan, world, "commits", _commits(plan)):
        raise UserError(
            f"{setting}: rank {world.rank} (host {world.host}) has {mine} in its Hub cache, rank 0 has {first}; name "
            f"the commit, as in {first or mine}"
        )


def _commits(plan: Plan) -> dict[str, str]:
    """Return the setting of each name on the Hub that a plan uses, with the name and its commit on this machine."""
    spec = plan.spec
    paths = {f"models.{role}.path": model.path for role, model in spec.models if model is not None}
    paths["data.tokenizer"] = spec.data.tokenizer
    found = {key: spec.hub_names[path] for key, path in paths.items() if path in spec.hub_names}
    for source in plan.data.sources:
        name = HubName.parse(source.path)
        snapshot = None if name is None else name.cached("dataset")
        if name is not None and snapshot is not None:
            # the cache names its directories by the commits
            found[source.setting] = f"{name.name}@{snapshot.name}"
    return found


def check_splits(plan: Plan, world: World) -> None:
    """Raise UserError if a protocol splits rows on this rank in another way than on rank 0."""
    own = plan.placement.own_splits(plan.batch)
    splits = {f"algorithm.protocols.{name}": json.dumps(split) for name, split in own.items()}
    for setting, mine, first in _differing(plan, world, "splits", splits):
        raise UserError(
            f"{setting}: rank {world.rank} (host {world.host}) splits the prompts of the mini-batches as "
            f"{one_line(mine)}, rank 0 as {one_line(str(first))}; {TransferProtocol.PURE}"
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


def run_title(plan: Plan, device: str) -> str:
    """Return a line on a run: its algorithm, its strategy and its devices. ``device``: cpu or cuda."""
    spec, where = plan.spec, counted(plan.placement.num_ranks, "CPU rank" if device == "cpu" else "GPU")
    run = f"{spec.name}: {spec.algorithm.name}, {counted(spec.steps, 'step')}, {plan.strategy} on {where}"
    return run + spec.debug.thrown_text


def where_models_are(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return a row for each placed model: name, ranks, node and device class, engine, and whether it is trained."""
    rows = []
    for model in plan.placement.models:
        devices = [plan.cluster.devices[rank] for rank in model.ranks]
        nodes = tuple(sorted({device.node for device in devices}))
        classes = sorted({device.device_class for device in devices} - {"any"})
        where = " ".join([f"{'node' if len(nodes) == 1 else 'nodes'} {span_of(nodes)}", *classes])
        role = "trained" if model.trained else f"copy of {model.role}" if model.follows else "frozen"
        rows.append((model.name, ranks_text(model.ranks), where, model.computing_text, role))
    return tuple(rows)
