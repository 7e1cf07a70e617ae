"""Runs of which each mechanism for several GPUs must have the results: their YAMLs, and the side that is as plain as
possible, one rank by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.job import MODELS, OF_SEVERAL, OPTIMIZERS, Job
from benchmarks.gpu.workload import run_config, write_data, write_model

TIMEOUT_SECONDS = 120
"""Deadline of the runs: before that of a stage, and longer than vLLM captures graphs."""
SIX = "placement=[0.5,0.5,0.5,0.5,0.5,0.5]"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Base:
    """A run, whose name begins with its algorithm.

    model:     of all roles: dense or experts
    settings:  of all sides
    plain:     settings of the reference alone
    """

    model: str = "dense"
    settings: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


BASES = {
    "grpo": Base(),
    "grpo-bfloat16": Base(settings=("models.actor.dtype=bfloat16", "models.ref.dtype=bfloat16")),
    "grpo-experts": Base("experts"),
    "grpo-adapters": Base(settings=("models.actor.lora={}",)),
    "grpo-agent": Base(
        settings=(
            "reward=null",
            f"environment={{path: '{HERE / 'counting.py'}:Counting', max_turns: 2, turn_tokens: 5}}",
        )
    ),
    "grpo-faulty": Base(settings=(f"algorithm.loop={HERE / 'faults.py'}:train_all", "steps=3")),
    "ppo": Base(),
    "ppo-segments": Base(settings=("rollout.segment_tokens=8", "steps=4")),
    # a lag is between ranks that train and others that generate
    "ppo-lag": Base(settings=("schedule.lag=1", SIX, "steps=4"), plain=("cluster.devices=2", "sync.overlap=false")),
}


def write_base(name: str, job: Job) -> Path:
    """Write the YAML of a base, its data and its model, and return its path. It has one rank."""
    directory, scale = job.directory / "several", OF_SEVERAL[job.device]
    directory.mkdir(exist_ok=True)
    write_data(directory, scale, shortest=scale.prompt // 4)
    model = MODELS[job.device][BASES[name].model]
    # a response ends after half of its longest length, in the mean
    ends = list(range(1, model["vocab_size"], scale.response // 2))
    path = write_model(directory, {**model, "eos_token_id": ends}, scale.dtype, job.device)
    return run_config(name, directory, scale, path, job.device, timeout_seconds=TIMEOUT_SECONDS)


def settings_of(name: str, job: Job) -> tuple[str, ...]:
    """Return the settings of all sides of a base."""
    plain = (f"models.all.optimizer={OPTIMIZERS[job.device]}", "rollout.engine=transformers")
    return (*plain, *BASES[name].settings, *job.settings)
