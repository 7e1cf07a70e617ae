"""Runs that a GPU may break: one that offloads and is resumed, and vLLM without and with graphs, sleep and adapters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.machine import Scale
from benchmarks.gpu.results import LeftOut, Row
from benchmarks.gpu.workload import run_config
from flexrlhf.config.spec_file import load_spec
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.plan.plan import Plan
from flexrlhf.strategies.instructions import Offload

COMMAND = (sys.executable, "-m", "flexrlhf")
TIGHT = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Shares of the memory that everything takes together, of which a run has the first that is enough."""
ENGINES: dict[str, tuple[str, ...]] = {
    "without graphs and sleep": ("rollout.cuda_graphs=false", "rollout.sleep=false"),
    "without sleep": ("rollout.sleep=false",),
    "with graphs and sleep": (),
    "with its own adapters": ("models.actor.lora={}", "rollout.adapters=separate"),
}
"""Settings of the runs with vLLM, by feature."""


def run_offloading(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Train PPO on one rank with less memory than its models take; then resume from the middle of that run."""
    scale = job.scale
    path = _tight_config(job.directory, scale, job.device)
    plan = make_plan(load_spec(path, ()))
    moved = {each.model for each in plan.schedule.instructions if isinstance(each, Offload)}
    budget.run([*COMMAND, "run", str(path)])
    planned, measured = plan.memories[0].peak_bytes, _peak(plan)
    found = f"{', '.join(sorted(moved))}; peak {planned / 1e6:.0f} MB planned, {measured / 1e6:.0f} MB measured"
    yield Row("offload", "PPO that offloads", found, {"planned": planned, "measured": measured})
    copies = facts_of(plan)["host_copies"]["0"]
    hidden = 1 - copies["waited"] / copies["seconds"] if copies["seconds"] else 0.0
    found = f"{copies['seconds']:.2f} s of copies to host memory and back, {hidden:.0%} hidden behind calls"
    yield Row("offload", "copies on streams of their own", found, {**copies, "hidden": hidden})
    middle = plan.spec.directory / "checkpoints" / f"step-{scale.steps // 2:06d}"
    again = ("--set", "name=ppo-resumed", "--resume", str(middle))
    budget.run([*COMMAND, "run", str(path), *again])
    last, resumed = (_metrics(plan.spec.directory.with_name(name))[-1] for name in (plan.spec.name, "ppo-resumed"))
    off = abs(resumed["reward_mean"] - last["reward_mean"])
    peak = _peak(replace(plan, spec=plan.spec.model_copy(update={"name": "ppo-resumed"})))
    found = f"reward of the last step {off:.1e} off, peak {peak / 1e6:.0f} MB"
    yield Row("offload", "resumed from its middle", found, {"difference": off, "measured": peak})


def _tight_config(directory: Path, scale: Scale, device: str) -> Path:
    """Write a run with as little memory as it needs."""
    settings: dict[str, Any] = {"checkpoint": {"every": scale.steps // 2, "on_signal": False}}
    path = run_config("ppo-offload", directory, scale, scale.small, device, **settings)
    whole = make_plan(load_spec(path, ())).memories[0].peak_bytes
    for share in TIGHT:
        cluster = {"devices": 1, "device": device, "memory_gb": round(share * whole / 1e9, 5)}
        path = run_config("ppo-offload", directory, scale, scale.small, device, cluster=cluster, **settings)
        if make_plan(load_spec(path, ())).memories[0].peak_bytes < share * whole:
            break
    return path


def run_vllm(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Train GRPO with vLLM on the actor's rank, beginning with the features that are most likely to work."""
    if find_spec("vllm") is None:
        yield LeftOut("vllm", "GRPO with vLLM", "vllm is not installed")
        return
    for name, settings in ENGINES.items() if job.device == "cuda" else [("on CPUs", ())]:
        rollout = {"engine": "vllm", "parity": {"every": 1}}
        run = f"grpo-vllm-{name.replace(' ', '-')}"
        path = run_config(run, job.directory, job.scale, job.scale.small, job.device, rollout=rollout)
        try:
            further = (word for setting in settings for word in ("--set", setting))
            budget.run([*COMMAND, "run", str(path), *further], most=budget.left / 2)
        except Unfinished as error:
            yield LeftOut("vllm", f"GRPO with vLLM {name}", str(error))
            continue
        steps = _metrics(make_plan(load_spec(path, settings)).spec.directory)
        figures = {key: max(step[key] for step in steps) for key in ("parity_mean", "parity_p999", "parity_max")}
        figures["seconds"] = min(step["seconds"] for step in steps[1:])
        found = f"{figures['seconds']:.2f} s a step, log-probs {figures['parity_mean']:.2g} nats off in the mean, "
        yield Row("vllm", f"GRPO with vLLM {name}", f"{found}{figures['parity_max']:.2g} at most", figures)


def _metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _peak(plan: Plan) -> float:
    return float(facts_of(plan)["peak_bytes"]["0"])


def facts_of(plan: Plan) -> dict[str, Any]:
    """Return the facts of a run in addition to its spans."""
    found: dict[str, Any] = json.loads((plan.spec.directory / "timeline.json").read_text())["otherData"]
    return found
