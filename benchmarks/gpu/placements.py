"""``flexrlhf profile`` of this machine, and the time of a PPO step under three placements, predicted and measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.results import LeftOut, Row
from benchmarks.gpu.workload import run_config
from benchmarks.predicted_steps import PLACEMENTS
from flexrlhf.config.spec_file import load_spec
from flexrlhf.guideline.simulation.compare import compare, read_run
from flexrlhf.guideline.simulation.inputs import costs_for
from flexrlhf.guideline.simulation.lengths import read_lengths
from flexrlhf.guideline.simulation.simulate import simulate
from flexrlhf.plan.pipeline import make_plan

STAGE = "placements"
RANKS = 2
COMMAND = (sys.executable, "-m", "flexrlhf")


def run_placements(job: Job, budget: TimeBudget) -> Iterator[Row | LeftOut]:
    """Profile with two ranks, which share a GPU; then yield each placement's predicted and measured step time."""
    directory, scale = job.directory, job.scale
    shorter = replace(scale, prompts=max(4, scale.prompts // 2), response=scale.response // 2)
    cluster = {"devices": RANKS, "device": job.device}
    profile = directory / "profile.json"
    paths = {
        name: run_config(
            f"ppo-{name.replace(' ', '-')}",
            directory,
            shorter,
            scale.small,
            job.device,
            cluster=cluster,
            placement=json.loads(vector),
        )
        for name, vector in PLACEMENTS.items()
    }
    try:
        # two ranks wait for each other with one thread each, as in the runs
        budget.run([*COMMAND, "profile", str(paths["co-located"]), "-o", str(profile), "--seconds", "2"])
    except Unfinished as error:
        yield LeftOut(STAGE, "profile and three placements", str(error))
        return
    yield Row(STAGE, "profile", f"measured with {RANKS} ranks, {profile.name}")
    for name, path in paths.items():
        try:
            yield _one(name, path, profile, budget)
        except Unfinished as error:
            yield LeftOut(STAGE, name, str(error))


def _one(name: str, path: Path, profile: Path, budget: TimeBudget) -> Row:
    """Predict, then run one placement."""
    plan = make_plan(load_spec(path, ()))
    simulation = simulate(plan, costs_for(plan.spec, profile).costs, read_lengths(None, plan))
    budget.run([*COMMAND, "run", str(path)])
    compared = compare(simulation, read_run(plan.spec.directory / "timeline.json"))
    predicted, measured = simulation.seconds, compared.step.measured
    found = f"{1e3 * predicted:.0f} ms predicted, {1e3 * measured:.0f} ms measured ({predicted / measured - 1:+.0%})"
    return Row(STAGE, f"PPO step, {name}", found, {"predicted": predicted, "measured": measured})
