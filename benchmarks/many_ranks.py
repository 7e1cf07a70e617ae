"""Seconds to plan, start, step and end with many CPU ranks on this machine, by their number.

    python -m benchmarks.many_ranks [--ranks 4 16 64] [--json FILE]

A toy model and three steps of PPO, co-located, interleaving and disaggregated. If there are more ranks than cores, they
load their libraries in turn, so the cores limit the start. One thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.gpu.workload import WORDS
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.plan.pipeline import make_plan

STEPS = 3
WAYS: dict[str, list[float]] = {
    "co-located": [1, 1, 1, 1],
    "interleaving": [1, 1, 0.5, 0.5],
    "disaggregated": [0.5] * 6,
}
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True)
class Result:
    """One run.

    groups:        process groups of the plan.
    instructions:  of a step.
    plan_s:        time to plan.
    start_s:       time from the command to the end of its first step.
    step_s:        mean time of the steps after the first.
    end_s:         seconds from the last step to the end of the command.
    """

    groups: int
    instructions: int
    plan_s: float
    start_s: float
    step_s: float
    end_s: float


def write_config(directory: Path, name: str, ranks: int) -> Path:
    """Write tokenizer, prompts and YAML of a run; return the YAML."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    prompts = [" ".join(WORDS[(row + place) % len(WORDS)] for place in range(7)) for row in range(4 * ranks)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    raw = {
        "name": name,
        "algorithm": {"name": "ppo", "prompts_per_step": 2 * ranks, "num_mini_batches": 2},
        "models": {role: {"init": dict(MODEL)} for role in ("actor", "critic", "ref", "reward")},
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": 8,
            "max_response_tokens": 8,
        },
        "steps": STEPS,
        "cluster": {"devices": ranks, "device": "cpu"},
        "placement": WAYS[name],
        "runs": str(directory / "runs"),
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def measure(config: Path) -> Result:
    """Plan and run a config."""
    began = time.perf_counter()
    plan = make_plan(load_spec(config))
    planned = time.perf_counter() - began
    command = [sys.executable, "-m", "flexrlhf", "run", str(config)]
    began, moments = time.perf_counter(), []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if "step " in line and f"/{STEPS}" in line:
                moments.append(time.perf_counter() - began)
    if process.returncode or len(moments) != STEPS:
        raise SystemExit(f"{config.name} failed")
    ended = time.perf_counter() - began
    step = (moments[-1] - moments[0]) / (STEPS - 1)
    sizes = len(plan.groups), len(plan.schedule.instructions)
    return Result(*sizes, planned, moments[0], step, ended - moments[-1])


def table(results: Sequence[tuple[str, int, Result]]) -> list[str]:
    """Return the lines of the table."""
    head = "| placement | ranks | groups | instructions | plan, s | start, s | step, s | end, s |"
    rows = [
        f"| {name} | {ranks} | {each.groups} | {each.instructions} | {each.plan_s:.2f} | {each.start_s:.1f} "
        f"| {each.step_s:.2f} | {each.end_s:.1f} |"
        for name, ranks, each in results
    ]
    return [head, "|---" * 8 + "|", *rows]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 16, 64])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    results = []
    for ranks in options.ranks:
        for name in WAYS:
            with TemporaryDirectory() as directory:
                results.append((name, ranks, measure(write_config(Path(directory), name, ranks))))
            print(table(results)[-1], flush=True)
    print("\n".join(table(results)))
    if options.json is not None:
        found = [{"placement": name, "ranks": ranks, **asdict(each)} for name, ranks, each in results]
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
