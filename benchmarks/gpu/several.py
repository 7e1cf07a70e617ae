"""Stages for several GPUs that compare no results: ``flexrlhf doctor``, and memory next to the plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.gpu.bases import SIX, settings_of, write_base
from benchmarks.gpu.clock import TimeBudget, Unfinished
from benchmarks.gpu.job import Job
from benchmarks.gpu.results import Row
from benchmarks.gpu.runs import COMMAND, facts_of
from flexrlhf.config.spec_file import load_spec
from flexrlhf.plan.pipeline import make_plan


def run_doctor(job: Job, budget: TimeBudget) -> Iterator[Row]:
    """Check all GPUs before a run of six models, or of four if their number is odd; yield each line of the table."""
    devices = (f"cluster.devices={job.gpus}", *([SIX] if job.gpus % 2 == 0 else []))
    path, settings = write_base("ppo", job), (*settings_of("ppo", job), *devices)
    further = [word for setting in settings for word in ("--set", setting)]
    try:
        printed, is_failed = budget.run([*COMMAND, "doctor", str(path), *further]), False
    except Unfinished as error:
        printed, is_failed = error.printed, True
        yield Row("doctor", "all checks", f"failed: {error}", {"failed": 1})
    for name, result, text in re.findall(r"^(\w[\w ]*?) {2,}(ok|warning|FAILS|skipped) {2,}(.*)$", printed, re.M):
        if result != "ok" or name in ("devices", "ranks", "links") or is_failed:
            yield Row("doctor", name, f"{result}: {text}".replace("|", "/"))


def run_memory(job: Job, budget: TimeBudget) -> Iterator[Row]:
    """Train GRPO on two ranks with a vLLM that sleeps; yield the lines that the run prints of memory in use, and the
    highest of each rank, next to the plan."""
    settings = (*settings_of("grpo", job), "cluster.devices=2", "models.all.zero=3", "name=grpo-memory")
    settings += ("rollout.engine=vllm", "rollout.tp=2")
    path = write_base("grpo", job)
    plan = make_plan(load_spec(path, settings))
    try:
        further = (word for setting in settings for word in ("--set", setting))
        printed = budget.run([*COMMAND, "run", str(path), *further])
    except Unfinished as error:
        yield Row("memory", "GRPO with vLLM", f"failed: {error}", {"failed": 1})
        return
    for line in re.findall(r"rank \d+: .*\bin use\b.*", printed):
        yield Row("memory", "printed by the run", line.replace("|", "/"))
    facts = facts_of(plan)
    for rank, memory in enumerate(plan.memories):
        planned, kind = memory.peak_bytes, "allocated by torch"
        if job.device == "cpu":
            planned, kind = memory.process_bytes, "of the process with its libraries"
        figures = {"planned": planned, "measured": facts["peak_bytes"][str(rank)]}
        found = f"{planned / 1e6:.0f} MB planned, {figures['measured'] / 1e6:.0f} MB {kind}"
        yield Row("memory", f"peak of rank {rank}", found, figures)
