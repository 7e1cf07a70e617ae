"""Checks and measurements on GPUs, in the order of likely failures; without one on CPU ranks with smaller models.

    make gpu                                       # all GPUs of the machine
    make gpu OPTIONS="--gpus 8 --only shards failures"

Fetches nothing. Each stage has its own time limit; results stay if it or a later stage fails, and skipped measurements
are named. Writes gpu.json and gpu.md; ``--only`` runs stages again and keeps the others' results. Ends with 1 if a test
failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import ON_CPU, ON_GPU, device_name, facts, visible_gpus
from benchmarks.gpu.results import LeftOut, Results
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.workload import write_data


def main() -> int:
    found = visible_gpus()
    options = _options(len(found))
    if gpus := found[: options.gpus]:
        # before this process looks at one
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    device = device_name()
    if device == "cpu":
        # for models this small; several would also wait for each other on a busy machine
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    directory: Path = options.output.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    # plain runs of earlier code
    shutil.rmtree(directory / "several" / "runs", ignore_errors=True)
    trl = options.trl or (sys.executable if find_spec("trl") else None)
    scale = ON_GPU if device == "cuda" else ON_CPU
    job = Job(directory, device, scale, len(gpus) or options.gpus or 1, gpus, tuple(options.set), trl)
    write_data(directory, job.scale)
    results = Results.of(facts(), directory, options.only)
    for name in options.only:
        _run(name, job, options.seconds, results)
    print(f"\n{results.table()}\nwritten to {directory / 'gpu.json'} and {directory / 'gpu.md'}")
    return int(any(row.figures.get("failed") for row in results.rows))


def _run(name: str, job: Job, seconds: float | None, results: Results) -> None:
    """Run a stage, and write each of its results as it is found."""
    stage = STAGES[name]
    # a stage for one GPU would use several by NCCL where its ranks share one
    pinned = {"CUDA_VISIBLE_DEVICES": job.visible[0]} if job.visible and stage.gpus == 1 else {}
    budget = TimeBudget(seconds or stage.seconds(job.device), pinned)
    reason = job.lacks(stage.gpus)
    try:
        for found in [LeftOut(name, "all", reason)] if reason else stage.run(job, budget):
            results.add(found)
            results.write(job.directory)
            print(f"{name} {budget.seconds - budget.left:4.0f} s  {found}", flush=True)
    except Unfinished as error:
        results.add(LeftOut(name, "later measurements", str(error)))
        results.write(job.directory)


def _options(found: int) -> argparse.Namespace:
    """Return the options. ``found``: GPUs of this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, help="GPUs, or CPU ranks without any; default: all of the machine, or 1")
    parser.add_argument("--seconds", type=float, help="limit of each stage, instead of its own")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES), help="stages to run, or run again")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of all runs on several GPUs, such as debug.backend=gloo",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu"), help="directory for everything that is written"
    )
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter of an environment that has trl")
    options = parser.parse_args()
    if options.gpus is not None and not 1 <= options.gpus <= (found or options.gpus):
        parser.error(f"--gpus {options.gpus}: use 1 to {found or 8}")
    return options


if __name__ == "__main__":
    sys.exit(main())
