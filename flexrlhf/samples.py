"""A few answers to held-out prompts as text, so that a person sees what a policy says: ``samples.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from flexrlhf.run_data import load_tokenizer

NUM_SAMPLES = 4


def append_samples(
    directory: Path, step: int, tokenizer: str, tokens: Tensor, prompt_mask: Tensor, answers: Tensor
) -> None:
    """Add the first rows of ``tokens`` (n, P+R) as text. prompt_mask (n, P), answers (n, R): 1 on real tokens."""
    decode = load_tokenizer(tokenizer).decode
    width = prompt_mask.shape[1]
    with (directory / "samples.jsonl").open("a") as file:
        for row in range(min(NUM_SAMPLES, len(tokens))):
            prompt = decode(tokens[row, :width][prompt_mask[row].bool()].tolist(), skip_special_tokens=True)
            answer = decode(tokens[row, width:][answers[row].bool()].tolist(), skip_special_tokens=True)
            file.write(json.dumps({"step": step, "prompt": prompt, "answer": answer}, ensure_ascii=False) + "\n")
