"""PPO on two device classes: step time by the rows of the slow one, next to the division by measured speed.

    sudo python -m benchmarks.mixed_classes [--quota 0.5] [--json FILE]

Two nodes of one CPU rank each on this machine, of which the second one may use a part of a core (a control group).
First ``flexrlhf doctor`` measures both speeds; then the same run is made with equal rows, with rows by those speeds and
with shares around them. One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.thin_link import MODEL, ROLES, write_inputs
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.simulation.compare import WARM_UP_STEPS, step_seconds
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.timeline import Trace

ROWS, STEPS, PORT = 24, 3, 29511
PERIOD_US = 100_000
AROUND = (Fraction(3, 4), Fraction(7, 8), Fraction(9, 8), Fraction(5, 4))
"""Factors of the measured speed of the slow class, for the shares around it."""
_GROUP = "flexrlhf-mixed"


@dataclass(frozen=True)
class Result:
    """One run.

    name:     of the shares
    rows:     of a step, by class
    seconds:  of a step
    """

    name: str
    rows: tuple[int, int]
    seconds: float


@contextmanager
def limited_group(share: float) -> Iterator[Path]:
    """Yield the file into which a process writes its number to have ``share`` of a core. Needs the right to do so."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup") / _GROUP if unified else Path("/sys/fs/cgroup/cpu") / _GROUP
    try:
        group.mkdir(exist_ok=True)
        quota = int(share * PERIOD_US)
        if unified:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        raise SystemExit(f"needs the right to make control groups ({error.strerror})") from None
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def start(arguments: list[str], directory: Path, node: int, group: Path) -> subprocess.Popen[str]:
    """Start ``flexrlhf`` on its own core, the second node with a part of it."""

    def limit() -> None:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[node]})
        if node == 1:
            group.write_text(str(os.getpid()))

    options = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{PORT}", "--node-rank", str(node)]
    return subprocess.Popen(
        [sys.executable, "-m", "flexrlhf", *arguments, *options],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,
    )


def together(arguments: list[str], directory: Path, group: Path) -> str:
    """Return the output of the first of both nodes."""
    jobs = [start(arguments, directory, node, group) for node in (0, 1)]
    outputs = [job.communicate()[0] for job in jobs]
    if jobs[0].returncode and "preflight:" not in outputs[0]:
        raise SystemExit("\n".join(outputs))
    return outputs[0]


def write_config(directory: Path, name: str, speeds: tuple[Fraction, Fraction]) -> Path:
    """Write the YAML of a run whose rows are shared by ``speeds``; return its path."""
    entry = {"ranks": [0, 1]}
    nodes = [
        {"devices": 1, "class": label, "memory_gb": 12, "speed": float(speed)}
        for label, speed in zip(("fast", "slow"), speeds, strict=True)
    ]
    raw: dict[str, Any] = {
        "name": name.replace(" ", "-"),
        "algorithm": {"name": "ppo", "prompts_per_step": ROWS, "num_mini_batches": 1},
        "models": {role: {"init": MODEL | {"num_hidden_layers": 4}} for role in ROLES},
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": 64,
            "max_response_tokens": 64,
        },
        "steps": WARM_UP_STEPS + STEPS,
        "cluster": {"device": "cpu", "nodes": nodes},
        "placement": dict.fromkeys(ROLES, entry),
        "checkpoint": {"on_signal": False},
        "runs": str(directory / "runs"),
    }
    path = directory / f"{raw['name']}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def measured_speeds(directory: Path, group: Path) -> tuple[Fraction, Fraction]:
    """Return the speeds of both nodes by ``flexrlhf doctor``."""
    config = write_config(directory, "doctor", (Fraction(1), Fraction(1)))
    output = together(["doctor", str(config)], directory, group)
    found = re.search(r"node 0 ([\d.e-]+), node 1 ([\d.e-]+) TFLOP/s", output)
    if found is None:
        raise SystemExit(output)
    return Fraction(1), Fraction(float(found[2]) / float(found[1])).limit_denominator(100)


def measure(directory: Path, name: str, speeds: tuple[Fraction, Fraction], group: Path) -> Result:
    """Run with rows by ``speeds``."""
    config = write_config(directory, name, speeds)
    together(["run", str(config)], directory, group)
    plan = make_plan(load_spec(config))
    spans = Trace.read(plan.spec.directory / "timeline.json").spans
    seconds = step_seconds(spans, range(WARM_UP_STEPS, WARM_UP_STEPS + STEPS))
    shares = plan.placement["actor"].layout.row_shares or (Fraction(1), Fraction(1))
    slow = round(ROWS * shares[1] / sum(shares))
    return Result(name, (ROWS - slow, slow), seconds)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixed_classes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quota", type=float, default=0.5, help="part of a core that the slow class has")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary, limited_group(options.quota) as group:
        directory = Path(temporary)
        write_inputs(directory)
        fast, slow = measured_speeds(directory, group)
        ways = {"equal": (fast, fast), "measured": (fast, slow)}
        ways |= {f"{float(factor):.3g} x measured": (fast, slow * factor) for factor in AROUND}
        print(f"speed of the slow class by doctor: {float(slow):.2f}")
        print("| shares | rows | step, s |\n|---|---|---|")
        results = []
        for name, speeds in ways.items():
            results.append(measure(directory, name, speeds, group))
            last = results[-1]
            print(f"| {name} | {last.rows[0]} / {last.rows[1]} | {last.seconds:.2f} |", flush=True)
    best = min(results, key=lambda each: each.seconds)
    found = next(each for each in results if each.name == "measured")
    print(f"measured shares take {found.seconds / best.seconds:.2f} of the best ({best.name})")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
