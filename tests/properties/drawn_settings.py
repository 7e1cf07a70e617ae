"""Random runs with every setting written that advice chooses: model, engines, devices, degrees, lengths and rollout."""

from __future__ import annotations

from random import Random
from typing import Any

Raw = dict[str, Any]

MODELS = (
    *("llama-7b", "llama-3.2-3b", "mistral-7b-v0.1", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b"),
    *("qwen3-30b-a3b", "qwen1.5-moe-a2.7b", "olmoe-1b-7b", "glm-4.5-air", "deepseek-v2-lite", "gpt-oss-20b"),
)
CLASSES = ("A100-80G", "A100-80G", "H100-80G", "RTX4090-24G", "V100-32G")
ROLES = {
    "sft": ("actor",),
    "reward": ("reward",),
    "dpo": ("actor", "ref"),
    "grpo": ("actor", "ref", "reward"),
    "ppo": ("actor", "critic", "ref", "reward"),
}
GENERATING = ("grpo", "ppo")


def draw_run(rng: Random) -> Raw:
    """Return a run with a vector that has all models on all devices, or shadows on the other half."""
    name, model = rng.choice(list(ROLES)), rng.choice(MODELS)
    node = {"count": rng.choice((1, 1, 1, 2, 4)), "devices": rng.choice((1, 2, 4, 4, 8)), "class": rng.choice(CLASSES)}
    total, roles = node["count"] * node["devices"], ROLES[name]
    has_shadows = name in GENERATING and total > 1 and rng.random() < 0.4
    rollout = _rollout(rng)
    vector: list[float] = [1] * len(roles)
    if has_shadows:
        vector = [0.5] * (len(roles) + (2 if name == "ppo" else 1))
    raw: Raw = {
        "name": "drawn",
        "algorithm": {"name": name, "prompts_per_step": 64, "num_mini_batches": rng.choice((1, 4))},
        "models": {"all": _settings(rng), **{role: {"init": model} for role in roles}},
        "data": {
            "path": "prompts.jsonl",
            "max_prompt_tokens": rng.choice((256, 1024)),
            "max_response_tokens": rng.choice((256, 3072, 8192)),
        },
        "cluster": {"nodes": [node]},
        "placement": vector,
    }
    if name == "grpo":
        raw["algorithm"]["samples_per_prompt"] = 4
    if name in GENERATING:
        raw["rollout"] = rollout
    return raw


def _settings(rng: Random) -> Raw:
    """Settings of all models: each that advice chooses, and up to four others than plain ones."""
    engine = rng.choice(("torch", "torch", "torch", "deepspeed", "megatron"))
    plain: Raw = {
        **{"zero": 1 if engine == "deepspeed" else 0, "shard": "all", "tp": 1, "pp": 1, "cp": 1, "ep": 1},
        **{"micro_batch_tokens": 8192, "generate_tokens": 65536},
    }
    no = dict.fromkeys(("activation_checkpointing", "offload_activations", "tiled_mlp", "offload_optimizer"), False)
    others: list[Raw] = [
        *({"zero": zero} for zero in (0, 1, 2, 3, 3)),
        *({"tp": tp} for tp in (2, 4, 8)),
        *({"pp": pp} for pp in (2, 3)),
        *({"cp": cp} for cp in (2, 4)),
        *({"ep": ep} for ep in (2, 4)),
        *({"cp": 2, "context_parallel": way} for way in ("ring", "ulysses")),
        {"zero": 3, "shard": "node"},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "offload_activations": True},
        *({name: True} for name in ("offload_activations", "tiled_mlp", "offload_optimizer")),
        *({name: True} for name in ("compile", "liger", "cuda_graphs", "compile")),
        *({"lora": {"rank": 8}}, {"lora": {"rank": 8, "targets": ["q_proj", "gate_up_proj"]}}),
        *({"attention": kernel} for kernel in ("sdpa", "flash_attention_2", "eager")),
        *({"dtype": dtype} for dtype in ("float32", "float16", "float16")),
        *({"fallback_dtype": "float16"}, {"optimizer": {"name": "sgd"}}),
    ]
    settings: Raw = {"engine": engine, "dtype": "bfloat16", **plain, **no}
    for change in rng.sample(others, rng.randint(0, 4)):
        settings |= change
    shadow = {name: settings[name] for name in plain}
    if rng.random() < 0.3:
        shadow |= {name: value for name, value in rng.choice(others).items() if name in shadow}
    if rng.random() < 0.1:
        shadow["engine"] = "torch"
    return settings | {"shadow": shadow}


def _rollout(rng: Random) -> Raw:
    engine = rng.choice(("transformers", "vllm", "vllm", "torch"))
    if engine == "transformers":
        return {"engine": engine}
    rollout: Raw = {"engine": engine, "tp": rng.choice((1, 1, 1, 2, 4, 16)), "kv_tokens": 65536}
    if engine == "vllm":
        others: list[Raw] = [
            *({"process": "child"}, {"adapters": "separate"}, {"config": {"quantization": "fp8"}}, {"sleep": False}),
            *({"pp": 2}, {"pp": 3}, {"kv_tokens": 1024}),
        ]
        rollout |= {"pp": 1} | (rng.choice(others) if rng.random() < 0.5 else {})
    return rollout
