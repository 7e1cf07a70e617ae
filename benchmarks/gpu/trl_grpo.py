"""GRPO by TRL on the prompts of ``benchmarks.gpu``. Imports nothing of flexrlhf: TRL may have its own environment.

python trl_grpo.py REQUEST
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Seconds of each optimizer step's end; two of them are a step here."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main(path: Path) -> None:
    request = json.loads(path.read_text())
    directory = Path(request["directory"])
    torch.manual_seed(0)
    sizes = {**request["model"], "use_cache": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=getattr(torch, request["dtype"]))
    # TRL loads the reference from where it loads the model
    model.save_pretrained(directory / "trl-model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    rows = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    lengths: list[float] = []
    total = request["prompts"] * request["samples"]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(fmean(map(len, completion_ids)))
        return [-abs(len(ids) - request["response"]) / request["response"] for ids in completion_ids]

    clock = StepClock()
    arguments = trl.GRPOConfig(
        output_dir=str(directory / "trl"),
        # two mini-batches of one set of responses, as ours
        per_device_train_batch_size=total // 2,
        steps_per_generation=2,
        num_generations=request["samples"],
        max_completion_length=request["response"],
        max_steps=2 * request["steps"],
        learning_rate=1e-6,
        beta=0.05,
        model_init_kwargs={"dtype": request["dtype"]},
        bf16=request["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=request["device"] == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=str(directory / "trl-model"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    # from the end of the first step, in which libraries load
    ends = clock.ends[1::2]
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    found = {"seconds": seconds, "response": fmean(lengths[1:]), "trl": trl.__version__}
    (directory / "trl-found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
