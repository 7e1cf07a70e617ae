"""Small models in files, and the ways to place them, for tests of loading."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small_models import TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from flexrlhf.config.model_settings import Head
from flexrlhf.engines.router_biases import router_biases


@dataclass(frozen=True)
class StoredModel:
    """A model as others might have saved it.

    config:  differences from the tiny one.
    head:    head that it is loaded with.
    dtype:   dtype of its files.
    sharded: whether its weights are in several files.
    renamed: parts of names in its files that differ from transformers'.
    """

    config: dict[str, Any] = field(default_factory=dict)
    head: Head = "causal"
    dtype: torch.dtype = torch.bfloat16
    sharded: bool = False
    renamed: tuple[str, str] = ("", "")


MODELS = {
    # rows that two ranks do not share evenly
    "llama": StoredModel({"vocab_size": 35, "intermediate_size": 28}, sharded=True),
    "tied": StoredModel({"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 35}),
    "qwen3": StoredModel({"model_type": "qwen3", "head_dim": 8}, dtype=torch.float16),
    "scores": StoredModel({"vocab_size": 33}, head="scalar", renamed=("score.", "v_head.")),
    # a base model has neither a head nor the prefix of one with a head
    "base": StoredModel(head="scalar", dtype=torch.float32, renamed=("model.", "")),
    # one tensor for each expert and matrix; a dense layer, too
    "experts": StoredModel(
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 14,
            "mlp_only_layers": [0],
        },
        sharded=True,
    ),
    # routers with biases in float32, latents; sinks and fused experts
    "latent": StoredModel(
        {
            **{"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 4},
            **{"qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            **{"n_group": 2, "topk_group": 1},
        },
    ),
    "sinks": StoredModel({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "expert scores": StoredModel({"model_type": "mixtral", "num_local_experts": 5}, head="scalar"),
    "long": StoredModel({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, head="both"),
}


def write_models(directory: Path) -> None:
    """Write all ``MODELS`` with random weights."""
    for name, stored in MODELS.items():
        torch.manual_seed(len(name))
        is_scalar = stored.head == "scalar"
        kind = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
        config = AutoConfig.for_model(**{**TINY, **stored.config, **({"num_labels": 1} if is_scalar else {})})
        model = kind.from_config(config).to(stored.dtype)
        for bias in router_biases(model).values():
            bias.normal_()
        model.save_pretrained(directory / name, max_shard_size="4KB" if stored.sharded else "5GB")
        if stored.renamed[0]:
            rename(directory / name / "model.safetensors", stored.renamed, without_head=name == "base")


def rename(file: Path, renamed: tuple[str, str], without_head: bool) -> None:
    found = load_file(file)
    if without_head:
        del found["score.weight"]
    save_file({name.replace(*renamed, 1): tensor for name, tensor in found.items()}, file, {"format": "pt"})


SIXTEEN = {"dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "torch-0": {"model": "llama"},
    "torch-0 frozen": {"model": "llama", "role": "ref", **SIXTEEN},
    "torch-0 masters": {"model": "tied", **SIXTEEN},
    "torch-3": {"model": "llama", "zero": 3},
    "torch-3 tied": {"model": "tied", "zero": 3, **SIXTEEN},
    "torch-2 frozen": {"model": "qwen3", "zero": 2, "role": "ref", **SIXTEEN},
    "torch-3 lora": {"model": "llama", "zero": 3, "lora": {"rank": 2}, **SIXTEEN},
    "torch-3 both heads": {"model": "long", "zero": 3},
    "torch-tp": {"model": "qwen3", "tp": 2},
    "torch-tp tied": {"model": "tied", "tp": 2, "role": "ref", **SIXTEEN},
    "torch-tp experts": {"model": "experts", "tp": 2},
    "torch-2 scores": {"model": "scores", "zero": 2},
    "torch-3 new head": {"model": "base", "zero": 3},
    "torch-0 experts": {"model": "experts", **SIXTEEN},
    "torch-3 experts": {"model": "experts", "zero": 3},
    "torch-3 expert scores": {"model": "expert scores", "zero": 3},
    "torch-3 latent": {"model": "latent", "zero": 3},
    "torch-0 ep sinks": {"model": "sinks", "ep": 2, "role": "ref"},
    "torch-0 ep": {"model": "experts", "ep": 2, "role": "ref"},
    "torch-3 ep": {"model": "experts", "ep": 2, "zero": 3},
    "deepspeed-0": {"model": "llama", "engine": "deepspeed"},
    "deepspeed-1": {"model": "tied", "engine": "deepspeed", "zero": 1},
    "deepspeed-2": {"model": "scores", "engine": "deepspeed", "zero": 2, **SIXTEEN},
    "deepspeed-3": {"model": "llama", "engine": "deepspeed", "zero": 3},
    "deepspeed-3 masters": {"model": "qwen3", "engine": "deepspeed", "zero": 3, **SIXTEEN},
    "deepspeed-3 frozen": {"model": "tied", "engine": "deepspeed", "zero": 3, "role": "ref", **SIXTEEN},
    "deepspeed-3 lora": {"model": "llama", "engine": "deepspeed", "zero": 3, "lora": {"rank": 2}, **SIXTEEN},
    "deepspeed-3 both heads": {"model": "long", "engine": "deepspeed", "zero": 3},
    "deepspeed-3 new head": {"model": "base", "engine": "deepspeed", "zero": 3},
}
