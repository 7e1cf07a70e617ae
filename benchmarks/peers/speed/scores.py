"""The reward of GRPO on both sides: a function of the response's text."""

from __future__ import annotations

from collections.abc import Sequence


def variety(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return the fraction of different words in each response."""
    words = [response.split() for response in responses]
    return [len(set(each)) / max(1, len(each)) for each in words]


def variety_of_completions(completions: Sequence[str], **columns: object) -> list[float]:
    """Return ``variety`` as TRL's trainers call it."""
    return variety(completions, completions)
