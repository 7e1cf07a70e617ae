"""GRPO or PPO by TRL on the prompts of ``benchmarks.gpu``. Imports nothing of flexrlhf, since TRL may have its own
environment.

python trl_steps.py REQUEST
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

MINI_BATCHES = 2
"""Steps with one set of responses, as ours."""
KL = 0.05


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Seconds at the end of every ``updates``-th call."""

    def __init__(self, updates: int) -> None:
        self._updates, self._calls = updates, 0
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._calls += 1
        if self._calls % self._updates:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Mean step time in seconds, without the first, in which libraries load."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)


@dataclass(frozen=True)
class Request:
    """Model and batch of the training.

    fields:   sizes of ``benchmarks.gpu.machine.Scale``, the model's directory, the device and the run's directory
    lengths:  mean tokens of the responses of each generation
    """

    fields: dict[str, Any]
    lengths: list[float] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return Path(self.fields["directory"])

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return int(self.fields["prompts"] * self.fields["samples"])

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.directory / "tokenizer", padding_side="left")

    @property
    def prompts(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.directory / "prompts.jsonl").read_text().splitlines()]

    def settings(self, **rest: Any) -> dict[str, Any]:
        """Return the settings of either trainer."""
        return {
            "output_dir": str(self.directory / "trl"),
            "learning_rate": 1e-6,
            "bf16": self.fields["dtype"] == "bfloat16",
            "gradient_checkpointing": False,
            "use_cpu": self.fields["device"] == "cpu",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        } | rest

    def model(self, kind: Any, **settings: Any) -> Any:
        """Return the model, of a class of transformers; a head that its files lack has random weights."""
        return kind.from_pretrained(self.fields["model"], dtype=getattr(torch, self.fields["dtype"]), **settings)


def grpo(request: Request) -> tuple[Any, StepClock]:
    """Return TRL's GRPO, whose optimizer steps are calls of the clock."""
    longest = request.fields["response"]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        request.lengths.append(fmean(map(len, completion_ids)))
        return [-abs(len(ids) - longest) / longest for ids in completion_ids]

    clock = StepClock(MINI_BATCHES)
    arguments = trl.GRPOConfig(
        **request.settings(
            per_device_train_batch_size=request.rows // MINI_BATCHES,
            steps_per_generation=MINI_BATCHES,
            num_generations=request.fields["samples"],
            max_completion_length=longest,
            max_steps=MINI_BATCHES * request.fields["steps"],
            beta=KL,
            model_init_kwargs={"dtype": request.fields["dtype"]},
        )
    )
    trainer = trl.GRPOTrainer(
        model=request.fields["model"],
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(request.prompts),
        processing_class=request.tokenizer,
        callbacks=[clock],
    )
    return trainer, clock


def ppo(request: Request) -> tuple[Any, StepClock]:
    """Return TRL's PPO, whose steps are calls of the clock: it counts mini-batches within a batch of its trainer.

    All responses have their full length.
    """
    clock = StepClock(1)
    rows = Dataset.from_list([{"input_ids": request.tokenizer(row["prompt"])["input_ids"]} for row in request.prompts])
    arguments = PPOConfig(
        **request.settings(
            per_device_train_batch_size=request.rows,
            gradient_accumulation_steps=1,
            num_mini_batches=MINI_BATCHES,
            local_rollout_forward_batch_size=request.rows,
            total_episodes=request.rows * request.fields["steps"],
            num_ppo_epochs=1,
            num_sample_generations=0,
            response_length=request.fields["response"],
            temperature=1.0,
            kl_coef=KL,
        )
    )
    causal = [request.model(AutoModelForCausalLM, use_cache=True) for _ in range(2)]
    padding = request.tokenizer.pad_token_id
    scored = [request.model(AutoModelForSequenceClassification, num_labels=1, pad_token_id=padding) for _ in range(2)]
    trainer = PPOTrainer(
        args=arguments,
        processing_class=request.tokenizer,
        model=causal[0],
        ref_model=causal[1],
        reward_model=scored[0],
        value_model=scored[1],
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[clock],
    )
    request.lengths.extend([request.fields["response"]] * request.fields["steps"])
    return trainer, clock


TRAINERS = {"grpo": grpo, "ppo": ppo}


def main(path: Path) -> None:
    """Train, and write the step time next to the request."""
    request = Request(json.loads(path.read_text()))
    trainer, clock = TRAINERS[request.fields["algorithm"]](request)
    trainer.train()
    found = {"seconds": clock.seconds, "response": fmean(request.lengths[1:]), "trl": trl.__version__}
    path.with_suffix(".found").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
