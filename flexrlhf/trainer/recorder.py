"""Recording of a run: statistics of all ranks become metrics.jsonl, timeline.json and the progress lines.

Statistics and spans travel through the job's key-value store: the first rank of a placed model publishes, rank 0
collects what has arrived and never waits for another rank while it trains.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexrlhf.comm.world import World
from flexrlhf.display.events import Send, StepDone
from flexrlhf.engines.base import Moments
from flexrlhf.loggers.run_loggers import RunLoggers
from flexrlhf.metrics import Triple, add, evaluate, is_better, statistic_name
from flexrlhf.placement.placed import ModelName
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.strategies.instructions import Eval, Run, Save
from flexrlhf.timeline import Span, Timeline, dump_spans, load_spans, saved_spans, write_trace
from flexrlhf.trainer.column_files import record_statistics
from flexrlhf.trainer.loaded_models import LoadedModel
from flexrlhf.trainer.samples import Part, append_samples, merged_samples
from flexrlhf.trainer.step_warnings import StepWarnings
from flexrlhf.trainer.work_time import WorkTime, time_statistics

TIMELINE = "timeline"
"""Folder with the spans up to each checkpoint, a file a rank."""


Report = dict[str, Any]
"""``statistics`` of an operator, ``labels``: words for the row of metrics, and ``samples``: parts of samples."""


def make_report(
    statistics: Mapping[str, Triple] | None = None,
    labels: Mapping[str, str] | None = None,
    samples: Sequence[Part] = (),
) -> Report:
    """Return the report of an operator; without arguments an empty one."""
    return {"statistics": dict(statistics or {}), "labels": dict(labels or {}), "samples": list(samples)}


@dataclass(frozen=True)
class Outlets:
    """Receivers of what is recorded, and the source of its times.

    send:     to whatever displays the run
    loggers:  of the run; on ranks other than 0 none
    work:     time of all ranks
    """

    send: Send
    loggers: RunLoggers
    work: WorkTime


class Recorder:
    """Publisher of this rank's statistics; on rank 0 it also collects and writes those of all ranks."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        directory: Path,
        files: RunFiles,
        outlets: Outlets,
        first_step: int = 0,
    ) -> None:
        self._plan = plan
        self._outlets = outlets
        self._world = world
        self._store = dist.PrefixStore(f"record/{plan.spec.name}", world.store)
        self._directory, self._files = directory, files
        self.next_step = first_step
        """The first step whose row of metrics is not written."""
        self._last_time = time.time()
        chosen = [each for each in plan.schedule.instructions if isinstance(each, Save) and each.best is not None]
        self._num_readers = sum(len(save.ranks) for save in chosen)
        self.best: dict[str, float] = {}
        """Best metric of the evaluations so far, by model."""
        self._in_flight: dict[int, dict[str, Report]] = defaultdict(dict)
        self._warnings = StepWarnings(plan.spec.guards, plan.spec.name, plan.batch.num_rows)

    def report(
        self,
        step: int,
        position: int,
        model: LoadedModel,
        operator: str,
        moments: Moments,
        labels: Mapping[str, str] | None = None,
        inner: int | None = None,
        samples: Sequence[Part] = (),
    ) -> dict[str, Triple]:
        """Sum the statistics of ``operator`` over the model's data-parallel group; its first rank publishes them.

        ``moments``: of this rank's rows, under the same names on all ranks of the group. ``samples``: on the first rank
        those of all ranks. Returns the sums.
        """
        named = {statistic_name(operator, name): value for name, value in moments.items()}
        names = sorted(named)
        # one collective for all of them
        table = model.dp.sum(torch.stack([named[name] for name in names])).tolist() if names else []
        statistics: dict[str, Triple] = {name: tuple(row) for name, row in zip(names, table, strict=True)}
        if self._world.rank == model.placed.ranks[0]:
            self.publish(step, position, make_report(statistics, labels, samples), inner)
        return statistics

    def publish(self, step: int, position: int, report: Report, inner: int | None = None) -> None:
        """Publish the report of the instruction at ``position`` of the walk.

        ``inner``: index in the list of an Eval, for an instruction there.
        """
        key, text = self._key(step, position, inner), json.dumps(report)
        self._store.set(key, text)
        if inner is not None and self._num_readers:
            self._store.set(f"best/{key}", text)
        if inner is None and self._plan.schedule.lag:
            self._keep(step, position, report)

    def _keep(self, step: int, position: int, report: Report) -> None:
        """Keep a report of a step that is in flight when a checkpoint is written, summed over chunks."""
        run = self._plan.schedule.instructions[position % len(self._plan.schedule.instructions)]
        assert isinstance(run, Run), "only runs report outside evaluations"
        kept = self._in_flight[step].setdefault(run.operator.name, make_report())
        add(kept["statistics"], report["statistics"])
        kept["labels"] |= report["labels"]
        kept["samples"] += report["samples"]

    def reports_from(self, step: int) -> dict[int, dict[str, Report]]:
        """Return what this rank has published for ``step`` and later ones, by operator; earlier ones are forgotten."""
        for old in [each for each in self._in_flight if each < step]:
            del self._in_flight[old]
        return dict(self._in_flight)

    def restore(self, reports: Mapping[str, Mapping[str, Report]], best: Mapping[str, float]) -> None:
        """Publish reports of steps in flight again, and set the best metrics.

        An operator's report is that of its first chunk; further chunks report nothing.
        """
        self.best |= best
        for step, operators in reports.items():
            pending = dict(operators)
            for index, run in enumerate(self._plan.schedule.instructions):
                is_due = run.due(int(step), self._plan.spec.steps)
                if isinstance(run, Run) and run.lag < self._plan.schedule.lag and is_due:
                    report = make_report(**pending.pop(run.operator.name, {}))
                    if self._world.rank == run.ranks[0]:
                        self.publish(int(step), index, report)

    def improved(self, save: Save, step: int) -> float | None:
        """Return the metric of ``save`` in the evaluation of ``step`` if it is better than all before; else None.

        Every rank of every such Save calls this once, and all get the same; waits for the ranks that evaluate.
        """
        assert save.best is not None
        value = self._read_evaluation(step).get(save.best)
        if value is None or not is_better(save.best, value, self.best.get(save.model)):
            return None
        self.best[save.model] = value
        return value

    def _read_evaluation(self, step: int) -> dict[str, float]:
        """Wait for the evaluation of ``step`` and return its metrics."""
        keys = {f"best/{key}": who for key, who in self._reports(step, Eval).items()}
        self._wait(keys, f"the evaluation of step {step}")
        total: dict[str, Triple] = {}
        for key in keys:
            add(total, json.loads(self._store.get(key))["statistics"])
        # the last reader clears up: the row of metrics may have been written long before
        if self._store.add(f"best/{step}/read", 1) == self._num_readers:
            for key in (*keys, f"best/{step}/read"):
                self._store.delete_key(key)
        return evaluate(total)

    def _key(self, step: int, position: int, inner: int | None) -> str:
        index = position % len(self._plan.schedule.instructions)
        return f"{step}/{index}" if inner is None else f"{step}/{index}.{inner}"

    def _reports(self, step: int, *kinds: type[Run | Eval]) -> dict[str, str]:
        """Return the keys of a step, or of its instructions of ``kinds``, and which rank publishes each."""
        keys: dict[str, str] = {}
        for index, instruction in enumerate(self._plan.schedule.instructions):
            if not isinstance(instruction, kinds or (Run, Eval)) or not instruction.due(step, self._plan.spec.steps):
                continue
            if isinstance(instruction, Run):
                keys[self._key(step, index, None)] = _publisher(instruction)
                continue
            for inner, each in enumerate(instruction.instructions):
                if isinstance(each, Run):
                    keys[self._key(step, index, inner)] = _publisher(each)
        return keys

    def collect(self) -> None:
        """Write the metrics of all steps that have been published in full, without waiting."""
        while self.next_step < self._plan.spec.steps and self._store.check(list(self._reports(self.next_step))):
            self._write_step()

    def append_spans(self, next_step: int, spans: Sequence[Span]) -> None:
        """Append the spans until the checkpoint before ``next_step`` to this rank's file."""
        path = self._directory / TIMELINE / f"rank-{self._world.rank:05d}.jsonl"
        self._files.append(path, json.dumps({"next_step": next_step, "spans": dump_spans(spans)}) + "\n")

    def write_until(self, step: int) -> None:
        """Wait for the metrics of all steps before ``step``, and write those that are not written."""
        while self.next_step < step:
            self._wait(self._reports(self.next_step), f"the metrics of step {self.next_step}")
            self._write_step()

    def finish(
        self, timeline: Timeline, usage: Mapping[ModelName, Mapping[str, int]], peak: int, start: Mapping[str, int]
    ) -> None:
        """Publish this rank's spans and memory usage; rank 0 waits for all ranks and writes the timeline.

        usage:  bytes by placed model.
        peak:   the most that the rank used since its models were loaded.
        start:  the most that it used before, by ``load`` and ``resume``.
        """
        self._store.set(f"timeline/{self._world.rank}", dump_spans(timeline.take()))
        memory = {"models": usage, "peak": peak, "start": start}
        self._store.set(f"memory/{self._world.rank}", json.dumps(memory))
        if self._world.rank == 0:
            self._write_timeline()
            self._outlets.loggers.finish(is_whole=self.next_step == self._plan.spec.steps)

    def _wait(self, keys: dict[str, str], what: str) -> None:
        self._world.wait_for(self._store, keys, what, self._plan.spec.timeout_seconds)

    def _write_step(self) -> None:
        total: dict[str, Triple] = {}
        labels: dict[str, str] = {}
        reporters: dict[str, str] = {}
        parts: list[Part] = []
        for key, reporter in self._reports(self.next_step).items():
            report = json.loads(self._store.get(key))
            add(total, report["statistics"])
            labels |= report["labels"]
            parts += report["samples"]
            reporters |= dict.fromkeys(report["statistics"], reporter)
            self._store.delete_key(key)
        now = time.time()
        if samples := merged_samples(self.next_step, parts):
            append_samples(self._directory, samples)
        seconds = now - self._last_time
        times = time_statistics(self._outlets.work.since_last(), seconds, self._plan.batch.num_rows, total)
        row = {"step": self.next_step, "seconds": seconds, **evaluate({**total, **times})}
        with (self._directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**row, **labels}) + "\n")
        spec = self._plan.spec
        if spec.debug.record_columns:
            record_statistics(self._directory, self.next_step, total, reporters)
        self._outlets.loggers.log({**row, **labels}, samples)
        self._outlets.send(StepDone(spec.name, self.next_step, spec.steps, row))
        self._warnings.observe(self.next_step, row)
        self.next_step, self._last_time = self.next_step + 1, now

    def _write_timeline(self) -> None:
        spans = list(saved_spans(self._directory / TIMELINE))
        memory = {}
        for rank in range(self._plan.placement.num_ranks):
            self._wait({f"{kind}/{rank}": f"rank {rank}" for kind in ("timeline", "memory")}, "the end of the run")
            spans += load_spans(self._store.get(f"timeline/{rank}").decode())
            memory[rank] = json.loads(self._store.get(f"memory/{rank}"))
        facts = {
            "device": self._world.device.type,
            "device_class": {device.rank: device.device_class for device in self._plan.cluster.devices},
            "held_bytes": {rank: found["models"] for rank, found in memory.items()},
            "peak_bytes": {rank: found["peak"] for rank, found in memory.items()},
            "start_bytes": {rank: found["start"] for rank, found in memory.items()},
        }
        first = max((span.step for span in spans), default=0) - self._plan.spec.timeline_steps
        write_trace(self._directory / "timeline.json", [span for span in spans if span.step > first], facts)


def _publisher(run: Run) -> str:
    """Return the rank that publishes the statistics of ``run``, in words."""
    return f"rank {run.ranks[0]} ({run.label})"
