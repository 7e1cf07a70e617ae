"""Writing of checkpoints: a model as a Hugging Face directory, or its adapters as peft's, atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from flexrlhf.config.spec import Head, ModelSpec
from flexrlhf.runs.run_directory import replace_directory
from flexrlhf.runs.tensor_files import save_tensors
from flexrlhf.runs.weight_writer import SHARD_BYTES, Forms, ModelFiles, forms_of
from flexrlhf.weights.lora import ADAPTER
from flexrlhf.weights.model_files import SCALAR_HEAD

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

BEST = "best.json"
"""File in a directory with the best model so far: the step, the metric and its value."""


@contextmanager
def model_writer(
    directory: Path,
    forms: Forms,
    config: Any,
    tokenizer: str | None,
    best: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[ModelFiles]:
    """Yield the files of a model, to write its tensors into, next to its config and the tokenizer's files.

    forms:        shapes and types of all tensors.
    best:         contents of ``best.json``, for a best model.
    texts:        further files, in the place of the tokenizer's where they have the same name.
    shard_bytes:  most bytes of weights in a file.
    """
    with _replacing(directory, tokenizer, best, texts) as fresh:
        config.save_pretrained(fresh)
        files = ModelFiles(fresh, forms, shard_bytes)
        try:
            yield files
        except BaseException:
            files.close(is_complete=False)
            raise
        files.close()


def save_model(
    directory: Path,
    weights: Mapping[str, Tensor],
    config: Any,
    tokenizer: str | None,
    best: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write config, weights and the tokenizer's files; the arguments are those of ``model_writer``."""
    with model_writer(directory, forms_of(weights), config, tokenizer, best, texts) as files:
        files.write(weights)


def save_adapters(
    directory: Path,
    weights: Mapping[str, Tensor],
    model: ModelSpec,
    tokenizer: str | None,
    head: Head = "scalar",
    best: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a directory that ``peft.PeftModel.from_pretrained(base, directory)`` reads, with a scalar head if any.

    ``head`` "both": the scalar head is in the files alone, since peft reads them as a causal model's. ``best``,
    ``texts``: as of ``save_model``.
    """
    from peft import LoraConfig

    assert model.lora is not None, "a model without adapters has none to save"
    targets = sorted({name.split(".lora_")[0].split(".")[-1] for name in weights if ".lora_" in name})
    modules = ["score"] if SCALAR_HEAD in weights and head != "both" else None
    config = LoraConfig(
        r=model.lora.rank,
        lora_alpha=model.lora.alpha,
        target_modules=targets,
        modules_to_save=modules,
        base_model_name_or_path=model.path,
        task_type="SEQ_CLS" if modules else "CAUSAL_LM",
        inference_mode=True,
    )
    tensors = {f"base_model.model.{name.replace(f'.{ADAPTER}', '')}": tensor for name, tensor in weights.items()}
    with _replacing(directory, tokenizer, best, texts) as fresh:
        config.save_pretrained(fresh)
        save_tensors(tensors, fresh / "adapter_model.safetensors")


@contextmanager
def _replacing(
    directory: Path, tokenizer: str | None, best: Mapping[str, Any] | None, texts: Mapping[str, str] | None
) -> Iterator[Path]:
    """Yield a directory to fill; it gets the tokenizer's files and then replaces ``directory``."""
    fresh = directory.with_name(directory.name + ".writing")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (Path(tokenizer) / name).is_file():
            shutil.copy(Path(tokenizer) / name, fresh / name)
    for name, text in (texts or {}).items():
        (fresh / name).write_text(text, encoding="utf-8")
    if best is not None:
        (fresh / BEST).write_text(json.dumps(best) + "\n")
    replace_directory(fresh, directory)
