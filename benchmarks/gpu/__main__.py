"""Checks and measurements on a GPU, in the order of likely failures; without a GPU on the CPU with smaller models.

    make gpu

Fetches nothing. Each stage has its own time limit; results stay if it or a later stage fails, and skipped measurements
are named. Writes gpu.json and gpu.md; ``--only`` runs stages again and keeps the others' results. Ends with 1 if a test
failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.gpu_tests import run_tests
from benchmarks.gpu.machine import ON_CPU, ON_GPU, Scale, device_name, facts
from benchmarks.gpu.measurements import measured
from benchmarks.gpu.placements import run_placements
from benchmarks.gpu.results import LeftOut, Results, Row
from benchmarks.gpu.runs import run_offloading, run_vllm
from benchmarks.gpu.speed import run_long, run_speed
from benchmarks.gpu.workload import write_data

SECONDS = {
    "device": (60, 60),
    "nccl": (120, 60),
    "kernels": (240, 60),
    "one-rank": (420, 150),
    "ranks": (420, 240),
    "offload": (300, 120),
    "vllm": (600, 150),
    "decoding": (300, 60),
    "speed": (600, 180),
    "long": (300, 180),
    "placements": (420, 240),
}
"""Longest time of each stage in seconds, on a GPU and on a CPU."""


@dataclass(frozen=True)
class Job:
    """Context of all stages.

    trl:  a Python with TRL, or None
    """

    directory: Path
    device: str
    scale: Scale
    trl: str | None

    def run(self, stage: str, budget: TimeBudget) -> Iterator[Row | LeftOut]:
        """Yield the results of a stage."""
        match stage:
            case "nccl" if self.device == "cpu":
                yield LeftOut(stage, "memory of communicators", "no GPU")
            case "device" | "nccl" | "kernels" | "decoding":
                yield from measured(stage, budget)
            case "one-rank" | "ranks":
                yield from run_tests(stage, self.directory, self.device, budget)
            case "offload":
                yield from run_offloading(self.directory, self.scale, self.device, budget)
            case "vllm":
                yield from run_vllm(self.directory, self.scale, self.device, budget)
            case "speed":
                yield from run_speed(self.directory, self.scale, self.device, budget, self.trl)
            case "long":
                directory, scale = self.directory / "long", self.scale.of_long_sequences
                write_data(directory, scale)
                yield from run_long(directory, scale, self.device, budget)
            case "placements":
                yield from run_placements(self.directory, self.scale, self.device, budget)


def main() -> int:
    options = _options()
    device = device_name()
    if device == "cpu":
        # for models this small; several would also wait for each other on a busy machine
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    directory: Path = options.output.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    trl = options.trl or (sys.executable if find_spec("trl") else None)
    job = Job(directory, device, ON_GPU if device == "cuda" else ON_CPU, trl)
    write_data(directory, job.scale)
    results = Results.of(facts(), directory, options.only)
    for stage in options.only:
        budget = TimeBudget(options.seconds or SECONDS[stage][device == "cpu"])
        try:
            for found in job.run(stage, budget):
                results.add(found)
                results.write(directory)
                print(f"{stage} {budget.seconds - budget.left:4.0f} s  {found}", flush=True)
        except Unfinished as error:
            results.add(LeftOut(stage, "later measurements", str(error)))
            results.write(directory)
    print(f"\n{results.table()}\nwritten to {directory / 'gpu.json'} and {directory / 'gpu.md'}")
    return int(any(row.figures.get("failed") for row in results.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="limit of each stage, instead of its own")
    parser.add_argument("--only", nargs="+", choices=SECONDS, default=list(SECONDS), help="stages to run, or run again")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu"), help="directory for everything that is written"
    )
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment that has trl")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
