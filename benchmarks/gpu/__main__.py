"""Tests, predictions and speed on the GPU of this machine; where there is none, on its CPU with smaller models.

    make gpu

Fetches nothing. Runs the tests marked gpu, then ``flexrlhf profile`` and three placements, predicted and measured, then
GRPO and PPO with random weights, also by TRL where it is installed. Writes gpu.json and gpu.md; what does not fit
into the time or is not installed is named there. Ends with 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.clock import TimeBudget
from benchmarks.gpu.gpu_tests import run_tests
from benchmarks.gpu.machine import ON_CPU, ON_GPU, device_name, facts
from benchmarks.gpu.placements import run_placements
from benchmarks.gpu.results import LeftOut, Results, Row
from benchmarks.gpu.speed import run_speed
from benchmarks.gpu.workload import write_data

STAGES = ("tests", "placements", "speed")
SHARE_OF_TESTS = 0.45
"""Of the time for everything."""
Stage = Callable[[], Iterable[Row | LeftOut]]


def main() -> int:
    options = _options()
    device = device_name()
    scale = ON_GPU if device == "cuda" else ON_CPU
    if device == "cpu":
        # for models this small; several would also wait for each other on a busy machine
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    budget = TimeBudget(options.seconds or scale.seconds)
    directory: Path = options.output.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    write_data(directory, scale)
    trl = options.trl or (sys.executable if find_spec("trl") else None)
    stages: dict[str, Stage] = {
        "tests": lambda: run_tests(directory, device, budget, SHARE_OF_TESTS * budget.seconds),
        "placements": lambda: run_placements(directory, scale, device, budget),
        "speed": lambda: run_speed(directory, scale, device, budget, trl),
    }
    results = Results(facts())
    for name in STAGES:
        if name in options.only:
            for found in stages[name]():
                results.add(found)
                results.write(directory)
                print(f"{budget.seconds - budget.left:4.0f} s  {found}", flush=True)
    print(f"\n{results.table()}\nwritten to {directory / 'gpu.json'} and {directory / 'gpu.md'}")
    return int(any(row.figures.get("failed") for row in results.rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="for everything; default: 520 on a GPU, 420 on a CPU")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="stages")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu"), help="directory for everything that is written"
    )
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment that has trl")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
