"""Runs that a fault of one rank ends, and one that SIGTERM ends and that is resumed under another placement."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.against import plan_side
from benchmarks.gpu.bases import settings_of, write_base
from benchmarks.gpu.clock import Failed, OutOfTime, TimeBudget, Unfinished
from benchmarks.gpu.faults import PLANTED, RANK, VARIABLE
from benchmarks.gpu.job import Job
from benchmarks.gpu.mechanisms import compared, run_directory
from benchmarks.gpu.results import LeftOut, Row
from flexrlhf.config.output_settings import CheckpointSpec
from flexrlhf.runs.run_directory import RunDirectory

BASE = "grpo-faulty"
RUN = (sys.executable, "-m", "flexrlhf", "run")


@dataclass(frozen=True)
class Fault:
    """A fault of rank 1.

    reason:   part of the sentence that names it, a regular expression
    timeout:  ``timeout_seconds`` of the run
    seconds:  longest time from the fault to the end of the run
    """

    reason: str
    timeout: int = 60
    seconds: float = 20.0


FAULTS = {
    "exception": Fault(f"RuntimeError: {PLANTED}"),
    "out of memory": Fault("memory is exhausted"),
    "SIGKILL": Fault("killed by SIGKILL"),
    # nothing is noticed before the deadline
    "SIGSTOP": Fault("does not respond|no sign of life", timeout=15, seconds=15 + 20.0),
}


def run_failures(job: Job, budget: TimeBudget) -> Iterator[Row]:
    """Train on two ranks, of which the second one fails: seconds to the end, and the sentence."""
    for name, fault in FAULTS.items():
        yield _failed("failures", name, fault, job, budget)


def _failed(stage: str, name: str, fault: Fault, job: Job, budget: TimeBudget) -> Row:
    further = (f"timeout_seconds={fault.timeout}", f"name=grpo-{name.replace(' ', '-')}")
    options = [word for setting in (*_settings(job), *further) for word in ("--set", setting)]
    mark = _fresh_mark(name, job)
    planted = {VARIABLE: f"{name}={mark}"}
    ended, sentence = True, "the run has not failed"
    try:
        budget.run([*RUN, str(write_base(BASE, job)), *options], planted, budget.left / 2)
    except Unfinished as error:
        ended, sentence = isinstance(error, Failed), _sentence(error.printed)
    seconds = time.time() - float(mark.read_text()) if mark.exists() else 0.0
    left = _end_processes(planted)
    problems = {
        "nothing was planted": not mark.exists(),
        f"no end in {seconds:.0f} s": not ended,
        f"later than {fault.seconds:g} s": seconds > fault.seconds,
        f"rank {RANK} and the reason are not named": not is_named(sentence, fault.reason),
        f"{left} processes are left": left > 0,
    }
    found = [problem for problem, is_true in problems.items() if is_true]
    text = "; ".join([f"{seconds:.1f} s", *found, sentence]).replace("|", "/")
    return Row(stage, name, text, {"seconds": seconds, "failed": len(found)})


def is_named(sentence: str, reason: str) -> bool:
    """Return whether a closing sentence names the rank that failed and why."""
    return re.search(rf"rank {RANK}\b.*(?:{reason})", sentence) is not None


def _sentence(printed: str) -> str:
    """Return the last sentence of a command, which other processes may have printed lines behind."""
    lines = [line for line in printed.splitlines() if line.startswith("flexrlhf: ")]
    return lines[-1].removeprefix("flexrlhf: ") if lines else "no sentence"


def _settings(job: Job) -> tuple[str, ...]:
    return (*settings_of(BASE, job), "cluster.devices=2", "models.all.zero=3")


def _fresh_mark(name: str, job: Job) -> Path:
    """Return the file that a fault writes the time to, which does not exist yet."""
    mark = job.directory / "several" / "faults" / name.replace(" ", "-")
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    return mark


def _end_processes(variables: Mapping[str, str]) -> int:
    """End the processes that have variables of a run which has ended, and return how many there were."""
    words = {f"{name}={value}".encode() for name, value in variables.items()}
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if words <= set(path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found += 1
    return found


def run_resumed(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Stop a run of two ranks with ZeRO-3 by SIGTERM, resume it in halves, and compare it with the plain run."""
    stage, name = "resume", "SIGTERM, resumed in halves"
    first = _settings(job)
    halves = (*first, "models.all.zero=0", "placement=[1,0.5]")
    planted = {VARIABLE: f"SIGTERM={_fresh_mark('SIGTERM', job)}"}
    run = run_directory(name, job)
    shutil.rmtree(run, ignore_errors=True)
    try:
        with suppress(Failed):
            budget.run([*RUN, _write_side(run, first, job)], planted)
        status = RunDirectory(run).status
        if status is None or status.state != "stopped":
            yield Row(stage, name, f"failed: not stopped by SIGTERM, {status}", {"failed": 1})
            return
        budget.run([*RUN, _write_side(run, halves, job), "--resume", "auto"])
    except OutOfTime as error:
        yield LeftOut(stage, name, str(error))
    except Failed as error:
        yield Row(stage, name, f"failed: {error}", {"failed": 1})
    else:
        yield compared(stage, name, BASE, halves[len(settings_of(BASE, job)) :], job, budget, fresh=False)


def _write_side(run: Path, settings: tuple[str, ...], job: Job) -> str:
    """Write the YAML of a run that is recorded for a comparison, and that a signal ends; return its path."""
    base = write_base(BASE, job)
    spec = plan_side(base, run.name, run.parent, settings).spec
    path = base.with_name(f"{run.name}.yaml")
    path.write_text(spec.model_copy(update={"checkpoint": CheckpointSpec()}).dump())
    return str(path)
