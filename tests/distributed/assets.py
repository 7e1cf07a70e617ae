"""Models, tokenizer and data of the equality suite, made when its tests begin."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from algorithm_settings import GAMES, SCORES
from chat_rows import TEMPLATE, chat_pairs, chats
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from flexrlhf.data.quickstart.corpus import build_tokenizer

Raw = dict[str, Any]
WORDS = [first + second for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
"""60 words and 4 special tokens: a vocabulary of 64."""
PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8
SIZES = {
    "vocab_size": len(WORDS) + 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Sizes of the models, as in a Llama config."""
LETTERS = {"vocab_size": 32, "pad_token_id": 1, "eos_token_id": 1, "bos_token_id": None}
"""In which a model of scores with another tokenizer differs."""
WIDE = {**SIZES, "head_dim": 32}
"""Sizes of an actor for vLLM, which accepts no narrower heads on CPUs."""
ENDS = [1, *range(5, 64, 6)]
"""Tokens that end a response of some actors."""
EVALUATION_ROWS = {"ppo": 11, "sft": 3, "reward": 11, "chats": 5, "chat-pairs": 5}
"""Rows to evaluate with, by file; of 3 the first of 4 ranks has none."""


def write_assets(directory: Path) -> None:
    """Tokenizer, models, data and a user's file of scores."""

    def model(name: str) -> str:
        return str(directory / "models" / name)

    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    torch.manual_seed(11)
    actor = _actor(SIZES)
    _save(actor, model("actor"))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    _save(actor, model("ref"))
    for role in ("critic", "reward"):
        _save(LlamaForSequenceClassification(_config(SIZES)), model(role))
    _save(_actor(WIDE), model("wide-actor"))
    _save(_actor({**WIDE, "vocab_size": SIZES["vocab_size"] + 12}), model("padded-actor"))
    for role in ("cost_critic", "cost", "reward_second"):
        _save(LlamaForSequenceClassification(_config(SIZES)), model(role))
    build_letters(directory / "models" / "letters")
    # the end token is also padding, so a score is read before it
    _save(LlamaForSequenceClassification(_config({**SIZES, **LETTERS})), model("letters"))
    for name, pad in (("reward-ends", SIZES["eos_token_id"]), ("reward-bare", None)):
        _save(LlamaForSequenceClassification(_config({**SIZES, "pad_token_id": pad})), model(name))
    _save(_actor({**SIZES, "num_key_value_heads": 4}), model("even-actor"))
    write_models_with_experts(model)
    for name in ("actor", "wide-actor"):
        _add_value_head(model(name), model(f"{name}-with-values"))
        _add_ends(model(name), model(f"{name}-with-ends"))
        _write_adapters(model(name), model(f"{name}-adapters"))
    _write_data(directory)
    (directory / "scores.py").write_text(SCORES)
    (directory / "games.py").write_text(GAMES)
    (directory / "chat.jinja").write_text(TEMPLATE)


def _write_adapters(source: str, destination: str) -> None:
    """Adapters of the causal model in ``source`` that change its policy, as peft writes them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        base = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, 0.1)
    model.save_pretrained(destination)


def write_models_with_experts(path: Callable[[str], str]) -> None:
    """Save a policy and a model of values whose layers have experts."""
    sizes = {**SIZES, "num_labels": 1, "num_experts_per_tok": 2, "initializer_range": 0.2}
    qwen = {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "head_dim": WIDE["head_dim"],
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    }
    actor = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **qwen))
    with torch.no_grad():
        actor.lm_head.weight[:2] *= torch.tensor([[2.0], [2.5]])
    _save(actor, path("experts-actor"))
    mixtral = AutoConfig.for_model("mixtral", **sizes, num_local_experts=6)
    _save(AutoModelForSequenceClassification.from_config(mixtral), path("experts-critic"))
    olmoe = AutoConfig.for_model("olmoe", **sizes, num_experts=4)
    _save(AutoModelForCausalLM.from_config(olmoe), path("other-experts-actor"))
    shared = {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    qwen2 = AutoConfig.for_model("qwen2_moe", **sizes, **shared)
    _save(AutoModelForSequenceClassification.from_config(qwen2), path("other-experts-critic"))
    grouped = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
    }
    latent = {
        "num_key_value_heads": SIZES["num_attention_heads"],
        "q_lora_rank": 10,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 8,
    }
    latent |= grouped
    sinks = {"num_local_experts": 4, "head_dim": WIDE["head_dim"], "sliding_window": 5}
    policy, values = AutoModelForCausalLM, AutoModelForSequenceClassification
    for name, family, own, kind in (
        ("balanced-actor", "glm4_moe", {**grouped, "head_dim": 8}, policy),
        ("latent-actor", "deepseek_v3", latent, policy),
        ("latent-critic", "deepseek_v2", latent, values),
        ("sinks-actor", "gpt_oss", sinks, policy),
        ("sinks-critic", "gpt_oss", sinks, values),
    ):
        model = kind.from_config(AutoConfig.for_model(family, **sizes | own))
        for end, tensor in (*model.named_parameters(), *model.named_buffers()):
            if end.endswith(("bias", "sinks")):  # of 0 they would show little
                torch.nn.init.normal_(tensor, std=0.05 if end.endswith("correction_bias") else 0.5)
        _save(model, path(name))


def build_letters(directory: Path) -> None:
    """Save a tokenizer of another vocabulary, with a token for every letter and the space: no bos, no padding."""
    vocabulary = {token: number for number, token in enumerate(["?", "</s>", " ", *"zyxwvutsrqponmlkjihgfedcba"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)


def _add_value_head(source: str, destination: str) -> None:
    """A copy of a causal model whose files also contain a scalar head, as large as a fresh classifier's."""
    shutil.copytree(source, destination)
    file = Path(destination) / "model.safetensors"
    head = SIZES["initializer_range"] * torch.randn(1, SIZES["hidden_size"])
    save_file({**load_file(file), "score.weight": head}, file, metadata={"format": "pt"})


def _add_ends(source: str, destination: str) -> None:
    """A copy of a causal model that names further tokens that end a response."""
    shutil.copytree(source, destination)
    (Path(destination) / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))


def _actor(sizes: Raw) -> LlamaForCausalLM:
    actor = LlamaForCausalLM(_config(sizes))
    with torch.no_grad():
        # the end token wins often enough that some responses stop early, and pad is sampled as a token like any other
        actor.lm_head.weight[:2] *= torch.tensor([[2.0], [2.5]])
    return actor


def _config(sizes: Raw) -> LlamaConfig:
    return LlamaConfig(**sizes, num_labels=1)


def _save(model: PreTrainedModel, path: str) -> None:
    model.save_pretrained(path)


def _write_data(directory: Path) -> None:
    """Rows of unequal length, some of whose responses are cut. 20 rows: three steps of 8 go round an epoch."""
    for name, rows in _rows(random.Random(5), 20).items():
        _write_rows(directory / f"{name}.jsonl", rows)
    for name, rows in _rows(random.Random(6), max(EVALUATION_ROWS.values())).items():
        _write_rows(directory / f"{name}-evaluation.jsonl", rows[: EVALUATION_ROWS.get(name)])


def _rows(rng: random.Random, count: int) -> dict[str, list[Raw]]:
    def words(shortest: int, longest: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(shortest, longest)))

    def prompt() -> str:
        return words(1, PROMPT_TOKENS - 1)

    return {
        # some rows have no solution
        "ppo": [{"prompt": prompt()} | ({"answer": WORDS[row]} if row % 3 else {}) for row in range(count)],
        "sft": [{"prompt": prompt(), "response": words(1, RESPONSE_TOKENS + 2)} for _ in range(count)],
        "reward": [{"prompt": prompt(), "chosen": words(1, 9), "rejected": words(1, 9)} for _ in range(count)],
        "texts": [{"text": words(1, RESPONSE_TOKENS + 2)} for _ in range(count)],
        "chats": chats(rng, WORDS, count),
        "chat-pairs": chat_pairs(rng, WORDS, count),
    }


def _write_rows(path: Path, rows: list[Raw]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
