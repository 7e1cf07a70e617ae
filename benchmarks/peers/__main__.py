"""Step time of PPO and GRPO by flexrlhf and by TRL 1.9.0, on CPU: two ranks with one thread each.

    python -m benchmarks.peers --make-environment --environment DIRECTORY      # once, by pip
    python -m benchmarks.peers --environment DIRECTORY --data DIRECTORY --model MODEL --json FILE

Both sides read the same prompts and start from the same weights; responses have their full length (of random weights
one in a hundred ends before), and the settings of the algorithm are the same: mini-batches, one epoch, KL penalty,
samples. Runs alternate, the first step of each is a warm-up, and the ratio is between medians. ``--data`` has
hh_pairs.jsonl.gz of ``make real``, ``--model`` is SmolLM2-135M's directory; workloads that need an option that is not
given are left out by name. Compare on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

from benchmarks.peers.speed.comparison import HEADER, RunOptions, compare
from benchmarks.peers.speed.trl_steps import make_environment, python_of
from benchmarks.peers.speed.workloads import RANKS, PeerWorkload, workloads


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, required=True, help="virtual environment with TRL")
    parser.add_argument("--make-environment", action="store_true", help="create it and end")
    names = list(dict.fromkeys(one.name for one in workloads()))
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="workloads")
    parser.add_argument("--algorithms", nargs="*", choices=["ppo", "grpo"], default=["ppo", "grpo"])
    parser.add_argument("--dtypes", nargs="*", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, in turns")
    parser.add_argument("--rows", type=int, help="responses of a step; default: the workload's")
    parser.add_argument("--data", type=Path, help="directory with hh_pairs.jsonl.gz")
    parser.add_argument("--model", type=Path, help="directory of a pretrained model")
    parser.add_argument("--json", type=Path, help="file for all seconds")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[PeerWorkload]:
    """Return the workloads to run; print which are left out."""
    requested = [
        replace(one, dtype=dtype, rows=one.rows if options.rows is None else options.rows)
        for one in workloads()
        for dtype in options.dtypes
        if one.name in options.only and one.algorithm in options.algorithms
    ]
    for one in requested:
        if missing(one, options):
            print(f"{one.label}: left out, it needs {missing(one, options)}")
    found = [one for one in requested if not missing(one, options)]
    check_rows(found)
    return found


def check_rows(work: Sequence[PeerWorkload]) -> None:
    """Raise SystemExit if a workload's rows do not split over ranks and mini-batches, with the nearest that do."""
    unfit = [one for one in work if one.rows < 1 or one.rows % one.least_rows]
    if not unfit:
        return
    one = max(unfit, key=lambda each: each.least_rows)
    # of all workloads, so that the next call is not refused for another one
    unit = lcm(*(each.least_rows for each in work))
    below = max(0, one.rows) // unit * unit
    nearest = f"{below} or {below + unit}" if below else str(unit)
    groups = f" with whole groups of {one.samples} samples" if one.samples > 1 else ""
    raise SystemExit(
        f"--rows {one.rows}: {one.label} needs a multiple of {one.least_rows}, for {one.mini_batches} mini-batches on "
        f"{RANKS} ranks{groups}; use {nearest}"
    )


def missing(workload: PeerWorkload, options: argparse.Namespace) -> str:
    """Return the options that a workload lacks."""
    needs = {"--data": workload.texts == "dialogues", "--model": workload.model is None}
    given = {"--data": options.data, "--model": options.model}
    return " and ".join(name for name, is_needed in needs.items() if is_needed and given[name] is None)


def main() -> None:
    options = arguments()
    if options.make_environment:
        return make_environment(options.environment)
    if not python_of(options.environment).exists():
        raise SystemExit(f"{options.environment} is no virtual environment: run with --make-environment first")
    settings = RunOptions(options.environment, options.steps, options.rounds, options.data, options.model)
    work = chosen(options)
    print(HEADER)
    results = []
    for workload in work:
        results.append(compare(workload, settings))
        print(results[-1].line(), flush=True)
        if options.json:
            options.json.write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
