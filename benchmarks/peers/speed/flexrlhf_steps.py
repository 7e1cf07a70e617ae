"""Steps of flexrlhf: one run of the command line, two ranks with one thread each."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import yaml

from benchmarks.peers.speed.child import run_quietly
from benchmarks.peers.speed.settings import KL, LEARNING_RATE
from benchmarks.peers.speed.workloads import RANKS, PeerJob


def spec_of(job: PeerJob, name: str) -> dict[str, Any]:
    """Return the YAML of ``job``: everything that the workload leaves open has its default."""
    work = job.workload
    optimizer = {"learning_rate": LEARNING_RATE, "max_grad_norm": None if work.algorithm == "ppo" else 1.0}
    policy = {"path": str(job.directory / "policy"), "dtype": work.dtype}
    scored = {"path": str(job.directory / "scored"), "dtype": work.dtype}
    models: dict[str, Any] = {"actor": policy | {"optimizer": optimizer}, "ref": policy}
    algorithm: dict[str, Any] = {
        "name": work.algorithm,
        "prompts_per_step": work.prompts,
        "num_mini_batches": work.mini_batches,
        "kl": {"coefficient": KL},
    }
    reward: dict[str, Any] = {}
    if work.algorithm == "ppo":
        models |= {"reward": scored, "critic": scored | {"optimizer": optimizer}}
    else:
        algorithm["samples_per_prompt"] = work.samples
        reward = {"reward": {"function": "benchmarks.peers.speed.scores:variety"}}
    return {
        "name": name,
        "algorithm": algorithm,
        "models": models,
        **reward,
        "data": {
            "path": str(job.directory / "prompts.jsonl"),
            "chat": "never",
            "max_prompt_tokens": work.prompt,
            "max_response_tokens": work.response,
        },
        "cluster": {"devices": RANKS, "device": "cpu"},
        "placement": [1] * len(models),
        "steps": job.steps,
        "runs": str(job.directory / "runs"),
    }


def seconds(job: PeerJob, name: str) -> list[float]:
    """Return the time of each step after the first in the run of that name."""
    config = job.directory / "flexrlhf.yaml"
    config.write_text(yaml.safe_dump(spec_of(job, name)))
    command = [sys.executable, "-m", "flexrlhf", "run", str(config)]
    run_quietly(command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, job.directory / "flexrlhf.log")
    lines = (job.directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines][1:]
