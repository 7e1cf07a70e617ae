"""Write a model as a Hugging Face directory, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def save_model(directory: Path, weights: Mapping[str, Tensor], config: Any, tokenizer: str | None) -> None:
    """Replace ``directory`` by one with config, weights and the tokenizer's files; at every moment one is whole."""
    fresh = directory.with_name(directory.name + ".writing")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    config.save_pretrained(fresh)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (Path(tokenizer) / name).is_file():
            shutil.copy(Path(tokenizer) / name, fresh / name)
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
