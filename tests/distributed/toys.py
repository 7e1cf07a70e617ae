"""Toys whose optimum is known: copying two words, earning without harm, preferring one half of the words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from flexrlhf.data.quickstart.corpus import build_tokenizer

Raw = dict[str, Any]
SCORES = Path(__file__).with_name("toy_scores.py")
WORDS = [first + second for first in "bdfg" for second in "aei"]
"""12 words of one token each, and 4 special tokens: a vocabulary of 16."""
HALVES = (WORDS[:6], WORDS[6:])
NUM_EVALUATION_PROMPTS, NUM_EVALUATION_PAIRS = 24, 200
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": len(WORDS) + 4,
    "max_position_embeddings": 16,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
EXPERTS = {
    **{"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"norm_topk_prob": True, "head_dim": 8, "num_key_value_heads": 4},
}
"""In which a policy with experts differs."""
COST_LIMIT = 0.5


def write_toys(directory: Path) -> None:
    """Write the tokenizer, all pairs of words as prompts, pairs of responses; evaluation rows are in no other file."""
    build_tokenizer([" ".join(WORDS)], directory / "tokenizer")
    rng = random.Random(1)
    prompts = [{"prompt": f"{first} {second}"} for first in WORDS for second in WORDS]
    rng.shuffle(prompts)
    pairs = [preference(rng) for _ in range(1200)]
    for name, rows, num_evaluated in (
        ("prompts", prompts, NUM_EVALUATION_PROMPTS),
        ("pairs", pairs, NUM_EVALUATION_PAIRS),
    ):
        _write(directory / f"{name}-evaluation.jsonl", rows[:num_evaluated])
        _write(directory / f"{name}.jsonl", rows[num_evaluated:])


def preference(rng: random.Random) -> Raw:
    """A pair of responses of four words; that with more words of the prompt's half of all words is the chosen one."""
    more, fewer = sorted(rng.sample(range(5), 2), reverse=True)
    prompt = rng.choice(WORDS)
    return {"prompt": prompt, "chosen": _words(rng, prompt, more), "rejected": _words(rng, prompt, fewer)}


def _words(rng: random.Random, prompt: str, related: int) -> str:
    near, far = HALVES if prompt in HALVES[0] else HALVES[::-1]
    words = rng.choices(near, k=related) + rng.choices(far, k=4 - related)
    rng.shuffle(words)
    return " ".join(words)


def _write(path: Path, rows: Iterable[Raw]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(learning_rate: float) -> Raw:
    return {"init": deepcopy(SHAPE), "optimizer": {"learning_rate": learning_rate, "betas": [0.9, 0.99]}}


def copying(directory: Path, name: str, algorithm: Raw, placement: object, steps: int = 200) -> Raw:
    """A run whose response should repeat the prompt's two words. The optimum is 1; a random response earns 1 / 16."""
    raw = _run(directory, name, algorithm, placement, steps)
    # a prompt of which all responses are alike teaches a group nothing: it must not come to that too soon
    raw["models"]["actor"] = trained(3e-3 if "samples_per_prompt" in algorithm else 5e-3)
    if name == "experts":
        raw["models"]["actor"] |= {"ep": 2, "zero": 3}
        raw["models"]["actor"]["init"] |= EXPERTS
    if algorithm["name"] == "ppo":
        raw["models"]["critic"] = trained(5e-3)
    raw["reward"] = {"function": f"{SCORES}:copied", "batch_size": 512}
    return raw


def earning(directory: Path, name: str, lagrange: Raw, placement: object, steps: int) -> Raw:
    """Two words a response: a dear one earns 1; a tempting one earns 2, and costs 1.

    With no regard to the cost it is 2 and the reward 4; without any cost the reward is 2. The bonus for entropy makes
    the policy follow the multiplier smoothly: in balance both words are likely, at a multiplier a little above 1.
    """
    algorithm = {
        **{"name": "safe-rlhf", "prompts_per_step": 64, "kl": None, "whiten": "none", "entropy_coefficient": 0.1},
        "lagrange": {"limit": COST_LIMIT, **lagrange},
    }
    raw = _run(directory, name, algorithm, placement, steps)
    raw["models"] = {role: trained(5e-3) for role in ("actor", "critic", "cost_critic")}
    raw["reward"] = {"function": f"{SCORES}:wealth", "batch_size": 512}
    raw["cost"] = {"function": f"{SCORES}:harm", "batch_size": 512}
    return raw


def preferring(directory: Path, name: str, algorithm: Raw, placement: object, steps: int = 150) -> Raw:
    """Pairs whose chosen response has more words of the prompt's half; accuracy on pairs that were never seen."""
    algorithm = {"prompts_per_step": 32, **algorithm}
    raw = _run(directory, name, algorithm, placement, steps, "pairs", response_tokens=5)
    raw["models"]["actor"] = trained(2e-3)
    raw["eval"]["every"] = 1
    return raw


def _run(
    directory: Path,
    name: str,
    algorithm: Raw,
    placement: object,
    steps: int,
    data: str = "prompts",
    response_tokens: int = 2,
) -> Raw:
    return {
        "name": name,
        "algorithm": algorithm,
        "models": {},
        "data": {
            "path": str(directory / f"{data}.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "max_prompt_tokens": 3,
            "max_response_tokens": response_tokens,
        },
        "eval": {"path": str(directory / f"{data}-evaluation.jsonl")},
        "placement": placement,
        "steps": steps,
        "cluster": {"devices": 2, "device": "cpu"},
        "runs": str(directory / "runs"),
        "timeout_seconds": 60,
    }
