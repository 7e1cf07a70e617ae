"""Results of a run, which rank 0 writes: metrics.jsonl, samples.jsonl, rows.jsonl, timeline.json, and rows of loggers.

Rank 0 collects the reports that have been published and never waits for another rank while it trains.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from flexrlhf.display.events import EventSender
from flexrlhf.metrics import METRICS, Outcome, Triple
from flexrlhf.operators.outcomes import RowAccount
from flexrlhf.placement.placed import ModelName
from flexrlhf.runs.recorded_columns import RecordedColumns
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_loggers import RunLoggers
from flexrlhf.strategies.schedule import ANEW, RunStart
from flexrlhf.text import span_of
from flexrlhf.timeline import Span, Timeline, Trace
from flexrlhf.trainer.execution import Execution, Observer
from flexrlhf.trainer.rank_context import RankContext
from flexrlhf.trainer.recorder import Recorder, Steps
from flexrlhf.trainer.reply_times import ReplyTimes
from flexrlhf.trainer.row_ledger import CARRIED
from flexrlhf.trainer.samples import SamplePart, merged_samples, sample_lines
from flexrlhf.trainer.step_rows import prompt_numbers
from flexrlhf.trainer.step_warnings import StepWarnings
from flexrlhf.trainer.work_time import WorkTime, time_statistics


class ResultsWriter(Observer):
    """Writer of the results of all ranks on rank 0; the others publish their spans and memory at the end."""

    def __init__(
        self,
        recorder: Recorder,
        directory: RunDirectory,
        work: WorkTime,
        loggers: RunLoggers,
        events: EventSender,
        prompts: Callable[[int, Mapping[int, int]], Sequence[int | None]],
        start: RunStart = ANEW,
    ) -> None:
        """Begin with the row of the first step that ``start`` trains on.

        directory:  of the run.
        work:       time of all ranks.
        loggers:    of the run; on ranks other than 0 none.
        events:     to the display of the run.
        prompts:    step, and prompt → its place in the order of the data if the step decides it → numbers of its
                    prompts in the data.
        """
        self.recorder, self.work = recorder, work
        self.next_step = start.next_step
        """The first step whose row of metrics is not written."""
        self._metrics, self._outcomes = directory.metrics.writer(), directory.outcomes.writer()
        self._samples = directory.samples.writer()
        self._directory, self._loggers, self._events, self._start = directory, loggers, events, start
        self._prompts = prompts
        self._plan, self._world, self._mailbox = recorder.plan, recorder.world, recorder.mailbox
        self._last_time = time.time()
        self._replies = ReplyTimes(self._plan, self._world) if self._plan.spec.environment is not None else None
        spec, rows = self._plan.spec, self._plan.batch.num_taken // self._plan.batch.sequences
        self._warnings = StepWarnings(spec.name, rows) if spec.guards.warnings else None

    def end(self, _: Execution) -> None:
        """Write, on rank 0, the metrics of all steps that have been published in full, without waiting."""
        if self._world.rank == 0:
            self.collect()

    def collect(self) -> None:
        """Write the metrics of all steps that have been published in full, without waiting."""
        while self.next_step < self._plan.spec.steps and self._is_published(self.next_step):
            self._write_step()

    def _is_published(self, step: int) -> bool:
        return self.recorder.steps.is_whole(step) and self._mailbox.has(list(self._keys(step)))

    def _keys(self, step: int) -> dict[str, str]:
        """Return the keys of the reports that the row of ``step`` needs, and who publishes each: with attempts also of
        those of the steps in flight."""
        in_flight = [self.recorder.attempt_keys(later) for later in self._steps_in_flight(step + 1)]
        return self.recorder.keys(step) | {key: who for keys in in_flight for key, who in keys.items()}

    def write_until(self, step: int) -> None:
        """Wait for the metrics of all steps before ``step``, and write those that are not written."""
        while self.next_step < step:
            self._mailbox.wait(self._keys(self.next_step), f"the metrics of step {self.next_step}")
            self._write_step()

    def _write_step(self) -> None:
        spec, step = self._plan.spec, self.next_step
        total: dict[str, Triple] = {}
        labels: dict[str, str] = {}
        reporters: dict[str, str] = {}
        parts: list[SamplePart] = []
        outcomes: dict[str, list[int]] = defaultdict(list)
        positions: dict[int, int] = {}
        for key, reporter in self.recorder.keys(step).items():
            report = self._mailbox.read(key)
            METRICS.add(total, report["statistics"])
            labels |= report["labels"]
            parts += report["samples"]
            for name, rows in report["outcomes"].items():
                outcomes[name] += rows
            positions |= dict(report["positions"])
            reporters |= dict.fromkeys(report["statistics"], reporter)
            self._mailbox.clear([key])
        now = time.time()
        if samples := merged_samples(step, parts):
            self._samples.append(sample_lines(samples))
        METRICS.add(total, self._account(step, outcomes, positions))
        if self._replies is not None:
            METRICS.add(total, self._replies.take(step))
        seconds = now - self._last_time
        others = CARRIED, Outcome.UNUSED
        num_rows = sum(len(rows) for name, rows in outcomes.items() if name not in others) or self._plan.batch.num_taken
        times = time_statistics(self.work.since_last(), seconds, num_rows, total)
        row = {"step": step, "seconds": seconds, **METRICS.evaluate({**total, **times})}
        self._metrics.append(json.dumps({**row, **labels}) + "\n")
        if spec.debug.record_columns:
            RecordedColumns(self._directory.path).write_statistics(step, total, reporters)
        self._loggers.log({**row, **labels}, samples)
        self._events.end_step(spec.name, step, spec.steps, row)
        if self._warnings is not None:
            self._warnings.observe(step, row)
        self.next_step, self._last_time = step + 1, now

    def _account(
        self, step: int, outcomes: Mapping[str, Sequence[int]], positions: Mapping[int, int]
    ) -> dict[str, Triple]:
        """Write the outcomes of the rows of ``step``, and return their statistics. A step without any is frozen."""
        rows = dict(outcomes) or {Outcome.FROZEN: range(self._plan.batch.num_rows)}
        spans = {name: span_of(tuple(rows[name])) for name in (*Outcome, CARRIED) if name in rows}
        takes_data, none = self.recorder.steps.takes_data(step), [None] * self._plan.batch.num_prompts
        numbers = list(self._prompts(step, positions)) if takes_data else none
        self._outcomes.append(json.dumps({"step": step, "prompts": numbers, "outcomes": spans}) + "\n")
        counts = {name: len(rows[name]) for name in spans}
        counts[RowAccount.IN_FLIGHT] = self._in_flight(step + 1) + counts.pop(CARRIED, 0)
        return {RowAccount.METRICS[name]: (1.0, float(count), 0.0) for name, count in counts.items()}

    def _in_flight(self, next_step: int) -> int:
        """Return the rows of the steps in flight before ``next_step``; with attempts, as many as these have taken."""
        steps = self._steps_in_flight(next_step)
        if self._plan.batch.attempts == 1:
            return len(steps) * self._plan.batch.num_taken
        shape = self._plan.batch
        # others are carried from a step before
        new = (
            prompt in shape.new_prompts(step)
            for step in steps
            for key in self.recorder.attempt_keys(step)
            for prompt, _ in self._mailbox.read(key)["positions"]
        )
        return sum(new) * shape.samples_per_prompt

    def _steps_in_flight(self, next_step: int) -> range:
        return self.recorder.steps.in_flight(next_step, self._start.generated)

    def finish(
        self,
        timeline: Timeline,
        usage: Mapping[ModelName, Mapping[str, int]],
        peaks: tuple[int, int],
        start: Mapping[str, int],
        rows: int,
        copies: Mapping[str, float],
    ) -> None:
        """Publish this rank's spans and memory usage; rank 0 waits for all ranks and writes the timeline.

        usage:  bytes by placed model.
        peaks:  the most that the rank used since its models were loaded, and that the driver of its GPU counted.
        start:  the most that it used before, by ``load`` and ``resume``.
        rows:   bytes of all columns at the end of a step.
        copies: seconds of copies to host memory and back, and of waits for them.
        """
        self._mailbox.publish(f"timeline/{self._world.rank}", Span.to_json(timeline.take()))
        memory = {"peak": peaks[0], "in_use": peaks[1], "start": start, "rows": rows, "copies": copies}
        self._mailbox.publish(f"memory/{self._world.rank}", {"models": usage, **memory})
        if self._world.rank == 0:
            self._write_timeline()
            for file in (self._metrics, self._outcomes, self._samples):
                file.close()
            self._loggers.finish(is_whole=self.next_step == self._plan.spec.steps)

    def _write_timeline(self) -> None:
        spans = list(self._directory.flights.saved_spans())
        memory = {}
        for rank in range(self._plan.placement.num_ranks):
            keys = {f"{kind}/{rank}": f"rank {rank}" for kind in ("timeline", "memory")}
            timeline, memory[rank] = self._mailbox.gather(keys, "the end of the run")
            spans += Span.from_json(timeline)
        facts = {
            "device": self._world.device.type,
            "device_class": {device.rank: device.device_class for device in self._plan.cluster.devices},
            "held_bytes": {rank: found["models"] for rank, found in memory.items()},
            "peak_bytes": {rank: found["peak"] for rank, found in memory.items()},
            "device_bytes": {rank: found["in_use"] for rank, found in memory.items()},
            "row_bytes": {rank: found["rows"] for rank, found in memory.items()},
            "start_bytes": {rank: found["start"] for rank, found in memory.items()},
            "host_copies": {rank: found["copies"] for rank, found in memory.items()},
        }
        first = max((span.step for span in spans), default=0) - Timeline.KEPT_STEPS
        Trace([span for span in spans if span.step > first], facts).write(self._directory.timeline)


def open_results(rank: RankContext, start: RunStart, steps: Steps | None) -> ResultsWriter:
    """Return the writer of a run, with its loggers. Raises UserError if one is not installed or cannot begin."""
    spec, world = rank.plan.spec, rank.world
    work = WorkTime(spec.name, world, rank.flight.timeline)
    if spec.loggers:
        rank.show("opening the loggers")
    loggers = RunLoggers.open(spec, rank.directory.path) if world.rank == 0 else RunLoggers(rank.directory.path)
    prompts = partial(prompt_numbers, rank.plan, rank.data)
    return ResultsWriter(Recorder(rank.plan, world, steps), rank.directory, work, loggers, rank.events, prompts, start)
