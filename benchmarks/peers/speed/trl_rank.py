"""One rank of TRL's trainers, started by torchrun in TRL's environment: writes the time of each step.

``torchrun --nproc-per-node 2 -m benchmarks.peers.speed.trl_rank JOB.json``
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.ppo import PPOConfig, PPOTrainer

from benchmarks.peers.speed.files import read_prompts
from benchmarks.peers.speed.scores import variety_of_completions
from benchmarks.peers.speed.settings import KL, LEARNING_RATE
from benchmarks.peers.speed.workloads import RANKS, PeerJob, PeerWorkload


class StepTimes(TrainerCallback):
    """Seconds between the ends of every ``updates``-th optimizer step."""

    def __init__(self, updates: int) -> None:
        self._updates, self._calls = updates, 0
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self._calls += 1
        if self._calls % self._updates == 0:
            self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time of each step after the first."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]


def common(job: PeerJob) -> dict[str, Any]:
    """Settings of both trainers."""
    return {
        "output_dir": str(job.directory / "trl"),
        "learning_rate": LEARNING_RATE,
        "temperature": 1.0,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": job.workload.dtype == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }


def ppo(job: PeerJob, times: StepTimes) -> Any:
    """Return TRL's PPO: a rank's rows are one batch of its trainer, since it counts mini-batches within batches."""
    local = job.workload.rows // RANKS
    tokenizer = AutoTokenizer.from_pretrained(job.directory / "policy")
    settings = PPOConfig(
        **common(job),
        per_device_train_batch_size=local,
        gradient_accumulation_steps=1,
        num_mini_batches=job.workload.mini_batches,
        local_rollout_forward_batch_size=local,
        total_episodes=job.workload.rows * job.steps,
        num_ppo_epochs=1,
        num_sample_generations=0,
        response_length=job.workload.response,
        kl_coef=KL,
    )
    policy, scored = (str(job.directory / name) for name in ("policy", "scored"))
    causal = [AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32) for _ in range(2)]
    heads = [
        AutoModelForSequenceClassification.from_pretrained(scored, num_labels=1, dtype=torch.float32) for _ in range(2)
    ]
    rows = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in read_prompts(job)])
    trainer = PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=causal[0],
        ref_model=causal[1],
        reward_model=heads[0],
        value_model=heads[1],
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[times],
    )
    ordered = DataLoader(rows, batch_size=local, collate_fn=trainer.data_collator, drop_last=True)
    trainer.dataloader = trainer.accelerator.prepare(ordered)
    return trainer


def grpo(job: PeerJob, times: StepTimes) -> Any:
    """Return TRL's GRPO: one generation, then as many updates as there are mini-batches."""
    work = job.workload
    settings = GRPOConfig(
        **common(job),
        per_device_train_batch_size=work.rows // RANKS // work.mini_batches,
        steps_per_generation=work.mini_batches,
        num_generations=work.samples,
        max_steps=work.mini_batches * job.steps,
        max_completion_length=work.response,
        shuffle_dataset=False,
        beta=KL,
        max_grad_norm=1.0,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.directory / "policy", dtype=torch.float32),
        args=settings,
        reward_funcs=variety_of_completions,
        train_dataset=Dataset.from_list([{"prompt": text} for text in read_prompts(job)]),
        processing_class=AutoTokenizer.from_pretrained(job.directory / "policy"),
        callbacks=[times],
    )


def job_of(path: Path) -> PeerJob:
    """Read the request of ``trl_steps``."""
    fields = json.loads(path.read_text())
    return PeerJob(PeerWorkload(**fields["workload"]), Path(fields["directory"]), fields["steps"])


def main() -> None:
    path = Path(sys.argv[1])
    job = job_of(path)
    torch.set_num_threads(1)
    is_ppo = job.workload.algorithm == "ppo"
    times = StepTimes(1 if is_ppo else job.workload.mini_batches)
    trainer = (ppo if is_ppo else grpo)(job, times)
    trainer.train()
    if trainer.accelerator.is_main_process:
        path.with_suffix(".seconds").write_text(json.dumps(times.seconds()))


if __name__ == "__main__":
    main()
