"""Reward by responses and by time, at several lags, with and without a correction for another policy's responses.

    python -m benchmarks.asynchrony.learning DIRECTORY [--seeds 3] [--svg FILE] [--tasks copying] [--rates 3e-3 1e-2]

Two tasks on one rank that generates and one that trains: the quick start's PPO with six models, and GRPO that has to
copy two words, from random weights, whose optimum is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from benchmarks.asynchrony.curves_svg import Curve, Panel, picture
from flexrlhf.data.quickstart import config_paths
from tests.distributed.toys import copying, write_toys

Raw = dict[str, Any]
LAGS = (0, 1, 4, 8)
ANY = "any"
"""Correction at lag 0, where all are the same."""
CORRECTIONS: dict[str, Raw | None] = {
    "none": None,
    "truncate": {"cap": 2.0},
    "mask": {"outside": "mask", "floor": 0.5, "cap": 2.0},
}
"""``algorithm.importance``. Without any, PPO's ratio and its clip are relative to the policy that sampled."""
SHOWN = ("none", "truncate")
"""Corrections in the picture."""
SMOOTHED = 5
"""Steps in a point of a curve."""
LAST = 10


@dataclass(frozen=True)
class Variant:
    """Runs of a line in the table, which differ by their seed."""

    name: str
    rate: float
    lag: int
    correction: str

    def run(self, seed: int) -> str:
        """Return the name of the run with ``seed``."""
        return f"{self.name}-{self.rate:g}-lag-{self.lag}-{self.correction}-{seed}".replace(".", "_")


@dataclass(frozen=True)
class Task:
    """A task.

    title:        in the picture
    rate:         learning rate
    goal:         a reward, of which the table says after how many steps it is reached
    worst, best:  ends of the picture's axis
    """

    title: str
    rate: float
    goal: float
    worst: float
    best: float

    def config(self, directory: Path, variant: Variant, seed: int) -> Raw:
        """Return the YAML of a run."""
        name, rate = variant.run(seed), variant.rate
        raw = _copying(directory, name, rate) if self.title == "copying" else _quick_start(name, rate)
        raw["algorithm"]["importance"] = CORRECTIONS.get(variant.correction)
        guards = {"warnings": False, "non_finite": "skip"}
        return raw | {"schedule": {"lag": variant.lag}, "seed": seed, "eval": None, "guards": guards}


TASKS = {
    "copying": Task("copying", rate=5e-3, goal=0.9, worst=0.0, best=1.0),
    "quick-start": Task("quick start", rate=5e-4, goal=2.5, worst=-3.0, best=4.0),
}


def _copying(directory: Path, name: str, rate: float) -> Raw:
    algorithm = {"name": "grpo", "kl": None, "entropy_coefficient": 0.05}
    algorithm |= {"prompts_per_step": 32, "samples_per_prompt": 8}
    raw = copying(directory, name, algorithm, {"actor.shadow": 0.5, "actor": 0.5}, steps=120)
    raw["models"]["actor"]["optimizer"]["learning_rate"] = rate
    return raw


def _quick_start(name: str, rate: float) -> Raw:
    raw: Raw = yaml.safe_load(config_paths()[-1].read_text())
    for role in ("actor", "critic"):
        raw["models"][role]["optimizer"]["learning_rate"] = rate
    return raw | {"name": name, "placement": [0.5] * 6, "steps": 80}


@dataclass(frozen=True)
class Runs:
    """Runs that differ by their seed.

    variant:  of all of them
    rewards:  mean reward of each step, by seed
    seconds:  median time of a step
    rows:     responses of a step
    clipped:  share of tokens without a gradient, since their ratio is clipped
    """

    variant: Variant
    rewards: Sequence[Sequence[float]]
    seconds: float
    rows: int
    clipped: float

    @property
    def mean(self) -> list[float]:
        return [fmean(values) for values in zip(*self.rewards, strict=True)]

    @property
    def smooth(self) -> list[float]:
        """Means of the last steps, over seeds."""
        mean = self.mean
        return [fmean(mean[max(0, step + 1 - SMOOTHED) : step + 1]) for step in range(len(mean))]

    def positions(self, size: float) -> list[float]:
        """Return the ends of the steps. ``size``: of a step."""
        return [size * (step + 1) for step in range(len(self.rewards[0]))]

    @property
    def line(self) -> str:
        variant, task = self.variant, TASKS[self.variant.name]
        reached = next((step + 1 for step, reward in enumerate(self.smooth) if reward >= task.goal), None)
        last = [fmean(values[-LAST:]) for values in self.rewards]
        return (
            f"| {task.title} | {variant.rate:g} | {variant.lag} | {variant.correction} | "
            f"{'never' if reached is None else reached} | {max(self.smooth):.2f} | {fmean(last):.2f} "
            f"({min(last):.2f} to {max(last):.2f}) | {self.clipped:.2f} | {1e3 * self.seconds:.0f} ms |"
        )


HEAD = "| task | learning rate | lag | correction | steps to the goal | highest | at the end | clipped | step |"


def train(directory: Path, variants: Sequence[Variant], seeds: int) -> None:
    """Make the runs that are not in the directory yet."""
    starts = any(each.name == "quick-start" for each in variants)
    if starts and not (directory / "runs/quickstart-reward/reward").is_dir():
        _command(directory, "run", "--set", "quickstart-ppo:steps=1")
    write_toys(directory)
    paths = []
    for seed in range(seeds):
        for each in variants:
            raw = TASKS[each.name].config(directory, each, seed)
            path, metrics = directory / f"{raw['name']}.yaml", directory / "runs" / raw["name"] / "metrics.jsonl"
            path.write_text(yaml.safe_dump(raw))
            if not metrics.is_file() or len(metrics.read_text().splitlines()) < raw["steps"]:
                paths.append(str(path))
    if paths:
        _command(directory, "run", *paths)


def _command(directory: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "flexrlhf", *words], cwd=directory, check=True, stdout=subprocess.DEVNULL)


def read(directory: Path, variant: Variant, seeds: int) -> Runs:
    paths = [directory / "runs" / variant.run(seed) / "metrics.jsonl" for seed in range(seeds)]
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    every = [row for each in rows for row in each]
    return Runs(
        variant,
        [[row["reward_mean"] for row in each] for each in rows],
        median(row["seconds"] for row in every),
        round(median(row["samples_per_second"] * row["seconds"] for row in every)),
        fmean(row["ratio_clipped"] for row in every),
    )


def panels(found: Sequence[Runs]) -> Iterator[list[Panel]]:
    """Yield a row of the picture for each task and correction: reward by responses, and by time."""
    for name, correction in product(dict.fromkeys(each.variant.name for each in found), SHOWN):
        task = TASKS[name]
        shown = [each for each in found if each.variant.name == name and each.variant.correction in (correction, ANY)]
        title = f"{task.title}, {'without correction' if correction == 'none' else 'importance: {cap: 2}'}"
        by_responses = [Curve(f"lag {each.variant.lag}", each.positions(each.rows), each.smooth) for each in shown]
        by_time = [Curve(f"lag {each.variant.lag}", each.positions(each.seconds), each.smooth) for each in shown]
        span = (task.worst, task.best)
        yield [Panel(title, "responses", by_responses, span), Panel(title, "seconds", by_time, span)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--lags", nargs="+", type=int, default=LAGS)
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=SHOWN)
    parser.add_argument("--rates", nargs="+", type=float, default=(), help="learning rates, in place of the task's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--svg", type=Path, help="draw the curves to this file")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    variants = [
        Variant(name, rate, lag, correction)
        for name in options.tasks
        for rate in options.rates or [TASKS[name].rate]
        for lag in options.lags
        for correction in (options.corrections if lag else [ANY])
    ]
    train(directory, variants, options.seeds)
    found = [read(directory, each, options.seeds) for each in variants]
    print("\n".join([HEAD, "|---" * 9 + "|", *(each.line for each in found)]))
    if options.svg is not None:
        options.svg.write_text(picture(list(panels(found))))


if __name__ == "__main__":
    main()
