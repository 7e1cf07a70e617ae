"""PPO on two hosts with a thin link between them: samples a second, bytes and times of placements, next to the plan's.

    sudo python -m benchmarks.thin_link [--mbit 200] [--ranks 1] [--ways NAME ...] [--hidden] [--json FILE]

Two network namespaces on this machine represent two hosts of a few ranks; the kernel limits the link. The model has
19 million parameters. Each way is planned, predicted with a profile of this machine and the link's speed, and run; the
first step is a warm-up. Bytes are those that the interface of each host counts, so with headers. One thread a rank.

With ``--hidden`` each way also runs on a link without a limit: the time that the thin one adds to a step is not hidden
behind computation, out of the time that the host which sends more has bytes on the link.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.gpu.workload import WORDS
from benchmarks.two_hosts import Link, can_link, linked_hosts
from flexrlhf.config.spec_file import load_spec
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.guideline.costs.measured import load_costs
from flexrlhf.guideline.simulation.compare import WARM_UP_STEPS, step_seconds
from flexrlhf.guideline.simulation.simulate import Simulation, simulate
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.timeline import Span, Trace

Raw = dict[str, Any]
PORT = 29500
MODEL: Raw = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
}
"""19 million parameters."""
PROMPT, RESPONSE, ROWS = 64, 64, 16
SIX = [0.5] * 6
WAYS: dict[str, Raw] = {
    "replicas": {"placement": [1, 1, 1, 1]},
    "ZeRO-3, torch": {"placement": [1, 1, 1, 1], "model": {"zero": 3}},
    "ZeRO-3, DeepSpeed": {"placement": [1, 1, 1, 1], "model": {"zero": 3, "engine": "deepspeed"}},
    "interleaving": {"placement": [1, 1, 0.5, 0.5]},
    "split": {"placement": [0.5, 0.5, 0.5, 0.5]},
    "split, 4 chunks": {"placement": [0.5] * 4, "schedule": {"num_chunks": 4}},
    "split, ref on both": {"placement": [0.5, 0.5, 1, 0.5]},
    "actor and ref, critic and reward": {"placement": {"actor": 0, "ref": 0, "critic": 1, "reward": 1}},
    "six models": {"placement": SIX},
    "six models, tp 2": {"placement": SIX, "model": {"tp": 2}},
    "six models, sent in 16 bits": {"placement": SIX, "sync": {"dtype": "bfloat16"}},
    "six models, sent in 16 bits, lag 1": {"placement": SIX, "sync": {"dtype": "bfloat16"}, "schedule": {"lag": 1}},
    "six models, syncs wait": {"placement": SIX, "sync": {"overlap": False}},
    "six models, sync every 4": {"placement": SIX, "sync": {"every": 4}},
    "six models, lag 1": {"placement": SIX, "schedule": {"lag": 1}},
    "six models, lag 1, no sync": {"placement": SIX, "schedule": {"lag": 1}, "sync": {"every": 1000}},
    "six models, 2 chunks": {"placement": SIX, "schedule": {"num_chunks": 2}},
    "six models, 4 chunks": {"placement": SIX, "schedule": {"num_chunks": 4}},
}
ROLES = ("actor", "critic", "ref", "reward")
NO_LIMIT = 10_000.0
"""Speed in megabits per second that stands for a link without a limit."""


@dataclass(frozen=True)
class Result:
    """One way on one link.

    samples_s:  samples a second, measured.
    seconds:    measured step time.
    predicted:  predicted step time.
    sent_mb:    MB that each host sends in a step, by its interface.
    planned_mb: MB of rows, weights and gradients that each host sends in a step by the plan; shards that ZeRO-3 gathers
                for a pass are not counted.
    link_s:     time of the bytes of the host that sends more on the link.
    free:       measured and predicted step time on a link without a limit; None: not measured.
    """

    samples_s: float
    seconds: float
    predicted: float
    sent_mb: tuple[float, float]
    planned_mb: tuple[float, float]
    link_s: float
    free: tuple[float, float] | None = None

    @property
    def hidden(self) -> tuple[float, float] | None:
        """Share of the time on the link that is hidden behind computation: measured, and predicted."""
        if self.free is None:
            return None
        measured, predicted = (
            1 - (thin - free) / self.link_s
            for thin, free in zip((self.seconds, self.predicted), self.free, strict=True)
        )
        return measured, predicted


def write_inputs(directory: Path) -> None:
    """Write a tokenizer and prompts, all of ``PROMPT`` tokens."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    # one more token than words: bos
    prompts = [" ".join(WORDS[(row + place) % len(WORDS)] for place in range(PROMPT - 1)) for row in range(4 * ROWS)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))


def write_config(directory: Path, name: str, mbit_s: float, ranks: int, steps: int, suffix: str = "") -> Path:
    """Write the YAML of a way and return its path. ``ranks``: of a host. ``suffix``: of the run's name."""
    way = dict(WAYS[name])
    if isinstance(way["placement"], dict):
        hosts = [{"ranks": [*range(first, first + ranks)]} for first in (0, ranks)]
        way["placement"] = {role: hosts[host] for role, host in way["placement"].items()}
    model = {"init": dict(MODEL), **way.get("model", {})}
    raw: Raw = {
        "name": name.replace(", ", "-").replace(" ", "-") + suffix,
        "algorithm": {"name": "ppo", "prompts_per_step": ROWS, "num_mini_batches": 4},
        "models": {role: dict(model) for role in ROLES},
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": PROMPT,
            "max_response_tokens": RESPONSE,
        },
        "steps": 1 + steps,
        "cluster": {
            "device": "cpu",
            "nodes": [{"count": 2, "devices": ranks, "memory_gb": 12 / ranks, "network_gb_s": mbit_s / 8e3}],
        },
        "checkpoint": {"on_signal": False},
        "save": {"every": None},
        "runs": str(directory / "runs"),
        **{key: way[key] for key in ("placement", "sync", "schedule") if key in way},
    }
    path = directory / f"{raw['name']}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def measure_profile(config: Path) -> Path:
    """Measure this machine with the models of ``config``; return the file."""
    path = config.parent / "profile.json"
    command = [
        sys.executable,
        "-m",
        "flexrlhf",
        "profile",
        str(config),
        "--set",
        "cluster={devices: 2, device: cpu}",
    ]
    with Popen([*command, "-o", str(path)], env=_environment()) as process:
        if process.wait():
            raise SystemExit("the profile failed")
    return path


def run(link: Link, config: Path, steps: int) -> tuple[list[Span], tuple[float, float]]:
    """Train on both hosts; return the timeline, and the MB that each host sends in a step after the first."""
    options = ["run", str(config), "--nnodes", "2", "--rdzv-endpoint", f"{link.hosts[0]}:{PORT}", "--node-rank"]
    jobs = [link.start(number, [*options, str(number)], config.parent) for number in (0, 1)]
    counts, lines = [], []
    try:
        for line in jobs[0].stdout or ():
            lines.append(line)
            if f"step 1/{1 + steps}" in line or f"step {1 + steps}/" in line:
                counts.append([link.sent_bytes(number) for number in (0, 1)])
        rest, _ = jobs[1].communicate()
        if any([jobs[0].wait(), jobs[1].returncode]) or len(counts) != 2:
            raise SystemExit("".join(lines) + rest)
    finally:
        for job in jobs:
            job.terminate()
    sent = tuple((last - first) / steps / 1e6 for first, last in zip(*counts, strict=True))
    return Trace.read(load_spec(config).directory / "timeline.json").spans, (sent[0], sent[1])


def measure(link: Link, config: Path, profile: Path, steps: int, mbit_s: float, free: Path | None) -> Result:
    """Predict and run the way of ``config``, and as ``free`` on a link without a limit."""
    simulation = _simulated(config, profile)
    link.limit(mbit_s)
    spans, sent = run(link, config, steps)
    seconds = step_seconds(spans, range(WARM_UP_STEPS, 1 + steps))
    without = None
    if free is not None:
        link.limit(NO_LIMIT)
        spans, _ = run(link, free, steps)
        without = step_seconds(spans, range(WARM_UP_STEPS, 1 + steps)), _simulated(free, profile).seconds
    sent_by = simulation.plan.traffic.sent
    planned = [(sent_by[node].rows + sent_by[node].weights + sent_by[node].gradients) / 1e6 for node in (0, 1)]
    on_link = 8 * max(sent) / mbit_s
    return Result(ROWS / seconds, seconds, simulation.seconds, sent, (planned[0], planned[1]), on_link, without)


def _simulated(config: Path, profile: Path) -> Simulation:
    return simulate(make_plan(load_spec(config)), load_costs(profile, 2))


def table(results: Mapping[str, Sequence[Result]]) -> list[str]:
    """Return the lines of the table: a row for each way, with each run."""
    head = "| placement | samples/s | step, s | predicted, s | MB sent, by host | planned | on the link, s | hidden "
    head += "| predicted |"
    lines = [head, "|---" * 9 + "|"]
    for name, runs in results.items():
        first = runs[0]
        samples = " · ".join(f"{each.samples_s:.2f}" for each in runs)
        seconds = " · ".join(f"{each.seconds:.1f}" for each in runs)
        sent, planned = (" / ".join(f"{value:.1f}" for value in pair) for pair in (first.sent_mb, first.planned_mb))
        hidden = "– | –" if first.hidden is None else " | ".join(f"{share:.0%}" for share in first.hidden)
        lines.append(
            f"| {name} | {samples} | {seconds} | {first.predicted:.1f} | {sent} | {planned} | {first.link_s:.1f} "
            f"| {hidden} |"
        )
    return lines


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.thin_link",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mbit", type=float, default=200, help="speed of the link, megabits per second each way")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a host")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), metavar="NAME", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way, in turns")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--hidden", action="store_true", help="also run each way on a link without a limit")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--keep", type=Path, help="keep configs, profile and runs in this directory")
    options = parser.parse_args()
    if not can_link():
        raise SystemExit("needs the right to make network namespaces (root), and ip and tc of iproute2")
    with TemporaryDirectory() as temporary, linked_hosts() as link:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        write_inputs(directory)
        configs = {
            name: write_config(directory, name, options.mbit, options.ranks, options.steps) for name in options.ways
        }
        free = {
            name: write_config(directory, name, NO_LIMIT, options.ranks, options.steps, "free")
            for name in options.ways * options.hidden
        }
        profile = directory / "profile.json"
        if not profile.exists():
            measure_profile(write_config(directory, "replicas", options.mbit, options.ranks, options.steps))
        results: dict[str, list[Result]] = {name: [] for name in configs}
        for _ in range(options.rounds):
            for name, config in configs.items():
                results[name].append(measure(link, config, profile, options.steps, options.mbit, free.get(name)))
                print(table({name: results[name]})[-1], flush=True)
        print("\n".join(table(results)))
    if options.json is not None:
        found = {name: [asdict(each) for each in runs] for name, runs in results.items()}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
