"""A directory with all inputs of small runs: configs, data of every form, models, a tokenizer and a checkpoint."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from flexrlhf.config.spec_file import load_spec
from flexrlhf.config.yaml_io import write_yaml
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.plan.pipeline import make_plan
from flexrlhf.runs.durable_files import write_durably
from flexrlhf.runs.manifest import Manifest, Progress
from flexrlhf.runs.run_directory import RunDirectory
from flexrlhf.runs.tensor_files import Piece, piece_file, write_pieces
from flexrlhf.weights.families import decoder_shapes
from flexrlhf.weights.shards import Part

Raw = dict[str, Any]
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "ten", "plus", "minus", "is", "the", "sum", "of")
SIZES = {"vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "intermediate_size": 16, "max_position_embeddings": 64, **SIZES}
GPT2 = {"model_type": "gpt2", "n_positions": 64, "vocab_size": 64, "n_embd": 8, "n_layer": 2, "n_head": 2} | {
    "bos_token_id": 1,
    "eos_token_id": 1,
}
RAW: Raw = {
    "name": "small",
    "steps": 3,
    "algorithm": {"name": "ppo", "prompts_per_step": 8, "num_mini_batches": 2},
    "models": {"actor": {"path": "llama"}, "reward": {"init": LLAMA}},
    "data": {"path": "prompts.jsonl", "max_prompt_tokens": 48, "max_response_tokens": 8},
    "checkpoint": {"every": 1},
}
SUPERVISED = {"algorithm": {"prompts_per_step": 8}, "models": {"actor": {"path": "llama"}}}
CONFIGS: dict[str, Raw] = {
    "ppo": RAW,
    "sft": RAW | SUPERVISED | {"algorithm": {"name": "sft"}, "data": RAW["data"] | {"path": "responses.json"}},
    "dpo": RAW | SUPERVISED | {"algorithm": {"name": "dpo"}, "data": RAW["data"] | {"path": "pairs.jsonl.gz"}},
    "rule": RAW
    | {"models": {"actor": {"path": "llama"}, "critic": {"init": LLAMA}}, "reward": {"rule": "exact_answer"}}
    | {"data": RAW["data"] | {"path": "questions.jsonl"}, "eval": {"path": "prompts.jsonl.gz"}},
    "ptx": RAW | {"algorithm": {"name": "grpo", "ptx": {"path": "texts.jsonl"}}},
    "tables": RAW
    | {"eval": {"path": "prompts.csv", "template": "{number} plus {number} is", "columns": {"prompt": "number"}}}
    | {
        "data": {
            **RAW["data"],
            "path": None,
            "sources": [{"path": "prompts.parquet", "weight": 3}, {"path": "inputs.json"}],
        }
    },
    # no rank starts: its data does not exist, and it has no tokenizer
    "broken": RAW
    | {"name": "broken", "models": {role: {"init": LLAMA} for role in ("actor", "reward")}}
    | {"data": {"path": "nowhere.jsonl"}},
}


def write_inputs(directory: Path) -> None:
    """Write all of it; everything but ``broken.yaml`` is valid. ``directory`` is the current one."""
    _write_data(directory)
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    _write_models(directory)
    for name, raw in CONFIGS.items():
        (directory / f"{name}.yaml").write_text(write_yaml(raw))
    _write_run()


def _write_data(directory: Path) -> None:
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=5)) for _ in range(12)]
    rows: dict[str, list[Raw]] = {
        "prompts.jsonl": [{"prompt": text} for text in texts],
        "prompts.jsonl.gz": [{"prompt": text, "answer": "ten"} for text in texts],
        "responses.json": [{"instruction": text, "input": "", "output": "is ten"} for text in texts],
        "pairs.jsonl.gz": [{"prompt": text, "chosen": " is ten", "rejected": " is two"} for text in texts],
        "questions.jsonl": [{"question": text, "answer": "ten"} for text in texts],
        "texts.jsonl": [{"text": text} for text in texts],
        "inputs.json": [{"input": text, "label": {"is": "ten"}} for text in texts],
    }
    (directory / "prompts.csv").write_text("number,sum\n" + "".join(f'{word},"ten, {word}"\n' for word in WORDS))
    table = pyarrow.Table.from_pylist([{"prompt": text, "reward_model": {"ground_truth": "ten"}} for text in texts])
    pyarrow.parquet.write_table(table, directory / "prompts.parquet")
    for name, items in rows.items():
        text = json.dumps(items) if name.endswith(".json") else "".join(json.dumps(item) + "\n" for item in items)
        (directory / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())


def _write_models(directory: Path) -> None:
    """Llama in one file, gpt2, whose names only transformers has, and Llama in two files with an index."""
    torch.manual_seed(0)
    llama, gpt2, several = (directory / name for name in ("llama", "gpt2", "several"))
    tensors = {name: torch.ones(shape) for name, shape in decoder_shapes(LLAMA).items()}
    for path in (llama, several):
        shutil.copytree(directory / "tokenizer", path)
        (path / "config.json").write_text(json.dumps(LLAMA))
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(directory / "tokenizer", gpt2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**GPT2))
    (gpt2 / "config.json").write_text(json.dumps(GPT2))
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, gpt2 / "model.safetensors")
    names, files = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    owners = {name: files[index % 2] for index, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if owners[name] == file}, several / file)
    index = {"metadata": {"total_size": 4 * sum(t.numel() for t in tensors.values())}, "weight_map": owners}
    (several / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_run() -> None:
    """A run of ``ppo.yaml`` that has stopped after two steps, in ``runs/small``, as ranks leave it."""
    plan = make_plan(load_spec("ppo.yaml"))
    run = plan.spec.directory
    directory = RunDirectory(run).checkpoint(2).path
    directory.mkdir(parents=True)
    pieces = {f"weights/{n}": Piece(torch.ones(s), Part.whole(s)) for n, s in plan.shapes["actor"].parameters}
    files = {piece_file("actor", 0): write_pieces(directory / piece_file("actor", 0), pieces)}
    files["actor.config.json"] = write_durably(directory / "actor.config.json", json.dumps(LLAMA).encode())
    progress = Progress(2, {"actor": {"updates": 4.0}}, {"actor": 2}, {}, {}, {})
    Manifest(plan.spec.dump(), "digest", {"torch": "2"}, files, progress).write(directory)
    (run / "config.yaml").write_text(plan.spec.dump())
    RunDirectory(run).write_status("stopped", 2, 3)
