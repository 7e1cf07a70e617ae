"""Prompts, a tokenizer and configs, made here: nothing is fetched."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.machine import Scale
from flexrlhf.data.quickstart.corpus import build_tokenizer

WORDS = [f"{first}{second}{third}" for first in "bdfgkl" for second in "aeiou" for third in "mnrst"]
NUM_PROMPTS = 256
ROLES = {"ppo": ("actor", "critic", "ref", "reward"), "grpo": ("actor", "ref")}


def write_data(directory: Path, scale: Scale, shortest: int | None = None) -> None:
    """Write a tokenizer of 150 words and prompts of ``shortest`` to ``scale.prompt`` tokens; None: all are longest."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    rng = random.Random(0)
    # one more token than words: bos
    lengths = (rng.randint(shortest or scale.prompt, scale.prompt) for _ in range(NUM_PROMPTS))
    prompts = [" ".join(rng.choices(WORDS, k=length - 1)) for length in lengths]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def write_model(directory: Path, model: Mapping[str, Any], dtype: str, device: str) -> Path:
    """Write a random model, made on ``device``; return its directory. Ranks would make each of theirs on one core."""
    path = directory / f"model-{model['model_type']}-{model['hidden_size']}"
    if not path.exists():
        with torch.device(device):
            config = AutoConfig.for_model(**model)
            AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(path)
        if device == "cuda":
            # ranks use the same GPU
            torch.cuda.empty_cache()
    return path


def run_config(
    name: str, directory: Path, scale: Scale, model: Mapping[str, Any] | Path, device: str, **rest: Any
) -> Path:
    """Write the YAML of a run and return its path. ``name`` begins with its algorithm; ``model`` may be a directory."""
    algorithm = name.partition("-")[0]
    source = {"path": str(model)} if isinstance(model, Path) else {"init": deepcopy(dict(model))}
    settings = {**source, "dtype": scale.dtype, "micro_batch_tokens": scale.micro}
    reward = {"new_head": True} if isinstance(model, Path) else {}
    many = {"samples_per_prompt": scale.samples} if algorithm == "grpo" else {}
    rows = scale.prompts if algorithm == "grpo" else scale.prompts * scale.samples
    raw = {
        "name": name,
        "algorithm": {"name": algorithm, "prompts_per_step": rows, "num_mini_batches": 2, **many},
        "models": {role: deepcopy(settings | (reward if role == "reward" else {})) for role in ROLES[algorithm]},
        "data": {
            "path": str(directory / "prompts.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": scale.prompt,
            "max_response_tokens": scale.response,
        },
        "steps": scale.steps,
        "cluster": {"devices": 1, "device": device},
        "checkpoint": {"on_signal": False},
        "runs": str(directory),
    } | rest
    if algorithm == "grpo":
        raw["reward"] = {"rule": "length", "target_tokens": scale.response}
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
