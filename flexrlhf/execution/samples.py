"""Samples for people to read: a few responses to evaluation prompts as text, in ``samples.jsonl``."""

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
    response_mask: Tensor,
    scores: Tensor | None = None,
) -> None:
    """Append the first rows of ``tokens`` (n, P+R) as text. prompt_mask (n, P), response_mask (n, R): 1 on real tokens.

    ``version``: weights version of the policy. ``scores`` (n,): of the responses, where they have some; one that is no
    finite number becomes null.
    """
    width = prompt_mask.shape[1]
    with (directory / "samples.jsonl").open("a") as file:
        for row in range(min(NUM_SAMPLES, len(tokens))):
            prompt = decode(tokens[row, :width][prompt_mask[row].bool()].tolist(), skip_special_tokens=True)
            response = decode(tokens[row, width:][response_mask[row].bool()].tolist(), skip_special_tokens=True)
            sample: dict[str, Any] = {"step": step, "policy_version": version, "prompt": prompt, "answer": response}
            if scores is not None:
                sample["score"] = float(scores[row]) if scores[row].isfinite() else None
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")
