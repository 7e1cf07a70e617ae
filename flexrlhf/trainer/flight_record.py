"""Flight record of a rank: its last instructions, its waits and its stack, written when it ends early.

On a GPU, whose work is queued, the device's events are the clock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from typing import Any

import torch

from flexrlhf.comm.progress import RankProgress
from flexrlhf.comm.world import World
from flexrlhf.plan.plan import Plan
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.run_files import RunFiles
from flexrlhf.timeline import Instant, Span, Timeline
from flexrlhf.trainer.execution import Execution, Observer


class _DeviceInstant:
    """An event behind the work that is queued on the current stream. Its time is between its queueing and its reading.

    So no error of adding up differences of events, and none between the two clocks, grows with the run.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._host, self._clock = time.time(), clock
        self._event: Any = torch.Event(clock.event.device, enable_timing=True)
        self._event.record()

    def is_reached(self) -> bool:
        """Return whether the device has done the work before it."""
        return bool(self._event.query())

    def seconds(self) -> float:
        """Wait for the device; return when it came here, in seconds since the epoch."""
        self._event.synchronize()
        clock = self._clock
        after = clock.seconds + clock.event.elapsed_time(self._event) / 1000
        clock.event, clock.seconds = self._event, min(max(after, self._host), time.time())
        return clock.seconds


class DeviceClock:
    """Instants on the current stream of the device of this rank.

    event, seconds:  the last instant whose time is known, and that time, in seconds since the epoch.
    """

    def __init__(self, device: torch.device) -> None:
        """Wait for the device, so that both clocks begin together."""
        torch.accelerator.synchronize(device)
        self.event: Any = torch.Event(device, enable_timing=True)
        self.event.record()
        self.event.synchronize()
        self.seconds = time.time()

    def now(self) -> Instant:
        """Return the instant behind the work that is queued now."""
        return _DeviceInstant(self)


class FlightRecord(Observer):
    """Instructions of this rank as they happen.

    progress:   position of every rank, and the waits of this one.
    timeline:   spans of the instructions that ended.
    directory:  of the run.
    """

    def __init__(self, plan: Plan, world: World, directory: RunDirectory) -> None:
        """Continue the log in ``directory``."""
        name, rank = plan.spec.name, world.rank
        models = {each: plan.placement.names_on(each) for each in range(world.size)}
        self.progress = RankProgress(world, name, models, plan.spec.timeout_seconds)
        # a CPU's work is done when a call returns, so the clock of the host serves
        clock = None if world.device.type == "cpu" else DeviceClock(world.device)
        self.timeline = Timeline(rank, Timeline.KEPT_STEPS, clock)
        self.directory = directory
        self._header: dict[str, Any] = {
            "rank": rank,
            "host": world.host,
            "pid": os.getpid(),
            "run": name,
            "models": models[rank],
            "debug": plan.spec.debug.thrown,
        }
        self._log = directory.flights.writer(self._header, Timeline.KEPT_STEPS)

    def begin(self, execution: Execution) -> None:
        """Report the position of this rank, and begin the span of an instruction."""
        instruction, step = execution.instruction, execution.step
        self.progress.report(execution.position, f"step {step}, {instruction.kind} {instruction.label}")
        execution.span = self.timeline.open(instruction.kind, instruction.label, step, instruction.chunk)
        self._log.begin(execution.span)

    def arrived(self, execution: Execution) -> None:
        """Begin the time of an operator; until now it was a wait."""
        self.timeline.begin(execution.span)

    def end(self, execution: Execution) -> None:
        """End the span of an instruction."""
        self.timeline.close(execution.span)
        self._log.end(execution.span)

    def append_spans(self, files: RunFiles, next_step: int) -> None:
        """Append the spans until the checkpoint before ``next_step`` to this rank's file."""
        path = self.directory.flights.saved_file(self._header["rank"])
        line = json.dumps({"next_step": next_step, "spans": Span.to_json(self.timeline.take())})
        files.append(path, line + "\n")

    def close(self) -> None:
        """Remove the log of a run that ended well."""
        self._log.close()

    def write(self, reason: str, stack: list[str] | None = None) -> None:
        """Write the record of this rank. ``stack``: of an error; else that of the main thread, now."""
        waiting = self.progress.waiting
        record: dict[str, Any] = {
            **self._header,
            "reason": reason,
            "at": self.progress.position.what,
            "instructions": [asdict(span) for span in list(self._log.last)],
            "waiting": waiting and {"ranks": waiting.ranks, "seconds": round(time.monotonic() - waiting.since, 3)},
            "stack": main_stack() if stack is None else stack,
        }
        self.directory.flights.write_record(self._header["rank"], record)


def main_stack() -> list[str]:
    """Return the stack of the main thread, outermost call first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [] if frame is None else [line.rstrip() for line in traceback.format_stack(frame)]
