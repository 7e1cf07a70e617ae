"""All stages, in the order of likely failures: for one GPU, then for several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.clock import TimeBudget
from benchmarks.gpu.communicators import run_communicators
from benchmarks.gpu.gpu_tests import run_tests
from benchmarks.gpu.incidents import run_failures, run_resumed
from benchmarks.gpu.job import Job
from benchmarks.gpu.measurements import measured
from benchmarks.gpu.mechanisms import MECHANISMS, run_mechanisms
from benchmarks.gpu.placements import run_placements
from benchmarks.gpu.results import LeftOut, Row
from benchmarks.gpu.runs import run_offloading, run_vllm
from benchmarks.gpu.several import run_doctor, run_memory
from benchmarks.gpu.speed import run_long, run_speed

Results = Iterator[Row | LeftOut]


@dataclass(frozen=True)
class Stage:
    """A part of the command.

    run:     yields its results as they are found
    on_gpu:  longest time on GPUs, in seconds
    on_cpu:  longest time on CPUs
    gpus:    least number that it needs; a stage for one uses one alone
    """

    run: Callable[[Job, TimeBudget], Results]
    on_gpu: float
    on_cpu: float
    gpus: int = 1

    def seconds(self, device: str) -> float:
        """Return the longest time on a device in seconds."""
        return self.on_cpu if device == "cpu" else self.on_gpu


def _measured(stage: str, job: Job, budget: TimeBudget) -> Results:
    if (stage, job.device) == ("nccl", "cpu"):
        yield LeftOut(stage, "memory of communicators", "no GPU")
        return
    yield from measured(stage, budget)


def _tests(stage: str, job: Job, budget: TimeBudget) -> Results:
    return run_tests(stage, job.directory, job.device, budget)


def _several(stage: str) -> Stage:
    return Stage(partial(run_mechanisms, stage), 180, 600, min(each.ranks for each in MECHANISMS[stage]))


STAGES: dict[str, Stage] = {
    "device": Stage(partial(_measured, "device"), 60, 60),
    "nccl": Stage(partial(_measured, "nccl"), 120, 60),
    "kernels": Stage(partial(_measured, "kernels"), 240, 60),
    "one-rank": Stage(partial(_tests, "one-rank"), 420, 150),
    "ranks": Stage(partial(_tests, "ranks"), 420, 240),
    "offload": Stage(run_offloading, 300, 120),
    "vllm": Stage(run_vllm, 600, 150),
    "decoding": Stage(partial(_measured, "decoding"), 300, 60),
    "speed": Stage(run_speed, 600, 180),
    "long": Stage(run_long, 300, 180),
    "placements": Stage(run_placements, 420, 240),
    "doctor": Stage(run_doctor, 60, 240, 2),
    "communicators": Stage(run_communicators, 180, 240, 2),
    "shards": _several("shards"),
    "failures": Stage(run_failures, 180, 600, 2),
    **{name: _several(name) for name in MECHANISMS if name != "shards"},
    "resume": Stage(run_resumed, 180, 600, 2),
    "memory": Stage(run_memory, 180, 600, 2),
}
