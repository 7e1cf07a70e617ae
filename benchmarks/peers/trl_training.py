"""SFT, DPO and reward models by flexrlhf and by TRL's trainers: losses and gradient norms of the same steps.

    pip install trl==1.9.0                    # in a separate environment that also has flexrlhf
    python -m benchmarks.peers.trl_training --model MODEL --data DIRECTORY

``MODEL`` is an instruct model with a chat template, ``DIRECTORY`` has the files of ``make real``. Both sides start from
the same weights, take the same rows in the same order, all in float32, and update with the same AdamW. The rows are
messages, which each side renders by itself. Exits with 1 if a value differs by more than the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from benchmarks.peers.messages import read_dialogues, read_instructions, read_pairs
from flexrlhf.data.order import step_indices

LIMIT = 1e-4
STEPS = 5
SEED = 0
BETA = 0.1
OPTIMIZER = {"learning_rate": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
Row = dict[str, Any]
Trace = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


@dataclass(frozen=True)
class Comparison:
    """One algorithm on both sides.

    name:     of the algorithm in flexrlhf
    rows:     examples of a step
    tokens:   longest prompt with its response
    role:     model that is trained
    loss:     metric of flexrlhf with the loss
    norm:     metric of flexrlhf with the gradient norm
    trainer:  TRL's class
    config:   class of the trainer's settings
    """

    name: str
    rows: int
    tokens: int
    role: str
    loss: str
    norm: str
    trainer: Any
    config: Any


COMPARISONS = (
    Comparison("sft", 4, 192, "actor", "nll", "actor_grad_norm", SFTTrainer, SFTConfig),
    Comparison("dpo", 2, 192, "actor", "preference_loss", "actor_grad_norm", DPOTrainer, DPOConfig),
    Comparison("reward", 4, 96, "reward", "pair_loss", "reward_grad_norm", RewardTrainer, RewardConfig),
)


def rows_of(comparison: Comparison, data: Path, tokenizer: Any) -> list[Row]:
    """Return as many rows of the data as the steps take, none of them too long."""
    read = {"sft": read_instructions, "dpo": read_pairs, "reward": read_dialogues}[comparison.name]
    needed = STEPS * comparison.rows
    rows: list[Row] = []
    for row in read(data):
        if len(rows) < needed and longest(row, tokenizer) <= comparison.tokens:
            rows.append(row)
    assert len(rows) == needed, f"{len(rows)} rows of {comparison.name} have at most {comparison.tokens} tokens"
    return rows


def longest(row: Row, tokenizer: Any) -> int:
    """Return the tokens of the longest dialogue in a row."""
    ends = [row[key] for key in ("completion", "chosen", "rejected") if key in row]
    return max(len(tokenizer.apply_chat_template(row["prompt"] + end)["input_ids"]) for end in ends)


def trace_flexrlhf(comparison: Comparison, model: Path, rows: Sequence[Row], directory: Path) -> Trace:
    """Train by ``flexrlhf run``; return its metrics."""
    data = directory / f"{comparison.name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "name": comparison.name,
        "algorithm": {"name": comparison.name, "prompts_per_step": comparison.rows}
        | ({"beta": BETA} if comparison.name == "dpo" else {}),
        "models": {comparison.role: {"path": str(model), "optimizer": OPTIMIZER}},
        "data": {"path": str(data), "max_prompt_tokens": comparison.tokens, "max_response_tokens": comparison.tokens},
        "steps": STEPS,
        "seed": SEED,
        "runs": str(directory / "runs"),
    }
    config = directory / f"{comparison.name}.yaml"
    config.write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "flexrlhf", "run", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (directory / "runs" / comparison.name / "metrics.jsonl").read_text().splitlines()
    return [(step[comparison.loss], step[comparison.norm]) for step in map(json.loads, lines)]


def trace_trl(comparison: Comparison, model: Path, rows: Sequence[Row], directory: Path) -> Trace:
    """Train by TRL's trainer; return its log."""
    settings = comparison.config(
        output_dir=str(directory / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=comparison.rows,
        train_sampling_strategy="sequential",
        learning_rate=OPTIMIZER["learning_rate"],
        adam_beta1=OPTIMIZER["betas"][0],
        adam_beta2=OPTIMIZER["betas"][1],
        adam_epsilon=OPTIMIZER["eps"],
        weight_decay=OPTIMIZER["weight_decay"],
        max_grad_norm=OPTIMIZER["max_grad_norm"],
        lr_scheduler_type="constant",
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        **({"beta": BETA} if comparison.name == "dpo" else {}),
    )
    indices = [i for step in range(STEPS) for i in step_indices(SEED, step, comparison.rows, len(rows))]
    kind = AutoModelForSequenceClassification if comparison.name == "reward" else AutoModelForCausalLM
    trainer = comparison.trainer(
        model=kind.from_pretrained(model, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list([rows[i] for i in indices]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in logged]


def with_head(model: Path, tokenizer: Any, directory: Path) -> Path:
    """Write a sequence classifier on ``model`` with one random head, from which both sides start."""
    torch.manual_seed(SEED)
    scored = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    scored.config.pad_token_id = tokenizer.pad_token_id
    scored.save_pretrained(directory / "scored")
    tokenizer.save_pretrained(directory / "scored")
    return directory / "scored"


def report(name: str, ours: Trace, theirs: Trace) -> float:
    """Print a line for each step; return the largest relative difference."""
    largest = 0.0
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        differences = [abs(a / b - 1) for a, b in zip(mine, other, strict=True)]
        largest = max(largest, *differences)
        print(
            f"{name:<8} {step:>4}  {mine[0]:>11.7f} {other[0]:>11.7f} {differences[0]:>9.1e}"
            f"  {mine[1]:>11.6f} {other[1]:>11.6f} {differences[1]:>9.1e}",
            flush=True,
        )
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", choices=[each.name for each in COMPARISONS])
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    print(f"{'':<8} step  {'loss':>11} {'of TRL':>11} {'relative':>9}  {'norm':>11} {'of TRL':>11} {'relative':>9}")
    largest = 0.0
    for each in COMPARISONS:
        if options.only in (None, each.name):
            with TemporaryDirectory() as name:
                directory, model = Path(name), options.model
                if each.name == "reward":
                    model = with_head(model, tokenizer, directory)
                rows = rows_of(each, options.data, tokenizer)
                ours = trace_flexrlhf(each, model, rows, directory)
                largest = max(largest, report(each.name, ours, trace_trl(each, model, rows, directory)))
    print(f"largest difference {largest:.1e}, limit {LIMIT:g}")
    sys.exit(largest > LIMIT)


if __name__ == "__main__":
    main()
