"""Runs in which one word of the data is poison: the model's embedding of it is NaN, so all that it computes of a text
with this word is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from toys import SCORES, SHAPE, WORDS
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from flexrlhf.data.order import step_indices
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.plan.run_tokenizer import load_tokenizer

Raw = dict[str, Any]
SEED, PER_STEP = 3, 4
POISON = WORDS[-1]
STEPS = (
    ("ba be bi", "da de di", "fa fe fi", "ga ge ba"),
    ("be da fe", f"bi {POISON} fi", f"{POISON} ge ba", "da fa ba"),
    ("di fi ge", "be de fe", "ba da fa", "fi fa ge"),
)
"""Prompt and response of each row, by step. Of the second step each of two mini-batches has a poisoned row."""
BAD_STEP, BAD_ROW, BAD_MINI_BATCH = 1, 1, 0
CLEAN_STEPS = (STEPS[0], STEPS[2])


def write_assets(directory: Path) -> None:
    """Write the tokenizer, an actor and a critic with a poisoned word, and the data with and without it."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    (token,) = load_tokenizer(str(directory / "tokenizer")).encode(POISON, add_special_tokens=False)
    torch.manual_seed(0)
    kinds = {"actor": LlamaForCausalLM, "critic": LlamaForSequenceClassification}
    for name, kind in kinds.items():
        model: PreTrainedModel = kind(LlamaConfig(**SHAPE, num_labels=1))
        with torch.no_grad():
            model.get_input_embeddings().weight[token] = torch.nan
        model.save_pretrained(directory / name)
    _write(directory / "poisoned.jsonl", STEPS)
    _write(directory / "clean.jsonl", CLEAN_STEPS)


def _write(file: Path, steps: tuple[tuple[str, ...], ...]) -> None:
    """Write the rows so that the run's order of the data gives each step its own."""
    rows: dict[int, Raw] = {}
    for step, prompts in enumerate(steps):
        for index, text in zip(step_indices(SEED, step, PER_STEP, PER_STEP * len(steps)), prompts, strict=True):
            prompt, _, response = text.partition(" ")
            rows[index] = {"prompt": prompt, "response": response}
    file.write_text("".join(json.dumps(rows[index]) + "\n" for index in range(len(rows))))


def supervised(directory: Path, name: str, data: str, ranks: int, policy: str, **actor: Any) -> Raw:
    """A run of two optimizer steps each; the warm-up of the rate shows whether one that was left out counts."""
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 3}
    raw = _run(directory, name, data, ranks, policy)
    raw["algorithm"] = {"name": "sft", "prompts_per_step": PER_STEP, "num_mini_batches": 2}
    raw["models"] = {"actor": {"path": str(directory / "actor"), "optimizer": optimizer, **actor}}
    raw["steps"] = len(STEPS if data == "poisoned" else CLEAN_STEPS)
    return raw


def ppo(directory: Path, name: str, ranks: int, policy: str) -> Raw:
    """Prompts with and without poison for a critic that it poisons."""
    raw = _run(directory, name, "poisoned", ranks, policy)
    raw["algorithm"] = {"name": "ppo", "prompts_per_step": PER_STEP, "kl": None}
    raw["models"] = {"actor": {"init": SHAPE}, "critic": {"path": str(directory / "critic")}}
    raw["reward"] = {"rule": "length", "target_tokens": 2}
    raw["data"]["max_response_tokens"] = 2
    return raw | {"steps": len(STEPS)}


def recurrent(directory: Path, name: str, ranks: int, policy: str, **further: Any) -> Raw:
    """Two steps of an architecture that transformers decodes without its state."""
    raw = unscored(directory, name, ranks)
    init = {"model_type": "mamba", "state_size": 4, "num_hidden_layers": 1, "initializer_range": 0.4}
    raw["models"]["actor"]["init"] = {**init, **{k: v for k, v in SHAPE.items() if k not in init}}
    raw["reward"] = {"rule": "length", "target_tokens": 2}
    raw["guards"]["sampled_logprobs"] = policy
    algorithm = raw["algorithm"] | further.pop("algorithm", {})
    return raw | {"algorithm": algorithm, "steps": 2, **further}


def unscored(directory: Path, name: str, ranks: int) -> Raw:
    """A run of many steps whose reward fails for every response."""
    raw = _run(directory, name, "clean", ranks, "stop")
    raw["algorithm"] = {"name": "grpo", "kl": None, "prompts_per_step": PER_STEP, "samples_per_prompt": 2}
    raw["models"] = {"actor": {"init": SHAPE}}
    raw["reward"] = {"function": f"{SCORES}:failing"}
    return raw | {"steps": 1000}


def _run(directory: Path, name: str, data: str, ranks: int, policy: str) -> Raw:
    return {
        "name": name,
        "data": {
            **{"path": str(directory / f"{data}.jsonl"), "tokenizer": str(directory / "tokenizer")},
            **{"max_prompt_tokens": 3, "max_response_tokens": 3},
        },
        "cluster": {"devices": ranks, "device": "cpu"},
        "guards": {"non_finite": policy},
        "seed": SEED,
        "runs": str(directory / f"runs-{ranks}"),
        "timeout_seconds": 60,
    }
