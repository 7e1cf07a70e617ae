"""A few answers to held-out prompts as text, so that a person sees what a policy says: ``samples.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

NUM_SAMPLES = 4


def append_samples(
    directory: Path,
    step: int,
    version: int,
    decode: Callable[..., str],
    tokens: Tensor,
    prompt_mask: Tensor,
    answers: Tensor,
    scores: Tensor | None = None,
) -> None:
    """Add the first rows of ``tokens`` (n, P+R) as text. prompt_mask (n, P), answers (n, R): 1 on real tokens.

    ``version``: batches that the policy had been trained on. ``scores`` (n,): of the answers, where they have some; one
    that is no finite number is null.
    """
    width = prompt_mask.shape[1]
    with (directory / "samples.jsonl").open("a") as file:
        for row in range(min(NUM_SAMPLES, len(tokens))):
            prompt = decode(tokens[row, :width][prompt_mask[row].bool()].tolist(), skip_special_tokens=True)
            answer = decode(tokens[row, width:][answers[row].bool()].tolist(), skip_special_tokens=True)
            sample: dict[str, Any] = {"step": step, "policy_version": version, "prompt": prompt, "answer": answer}
            if scores is not None:
                sample["score"] = float(scores[row]) if scores[row].isfinite() else None
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
