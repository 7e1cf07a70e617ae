"""Reward functions of gspo.yaml; ``flexrlhf run`` calls them in worker processes of their own."""

from __future__ import annotations

KIND = ("please", "welcome", "glad", "pleasure", "of course", "enjoy", "lovely", "happy", "thank you")
RUDE = ("no.", "nobody", "yourself", "go away", "stop", "fool", "boring", "not care", "what now")


def kindness(prompts: list[str], responses: list[str]) -> list[float]:
    """Return the kind expressions in each response less the rude ones, at most two of either."""
    return [float(_number(KIND, response) - _number(RUDE, response)) for response in responses]


def kindness_as_in_trl(completions: list[str], **kwargs: object) -> list[float]:
    """Return the same scores in TRL's form."""
    return kindness([], completions)


def _number(expressions: tuple[str, ...], text: str) -> int:
    found = [expression for expression in expressions if expression in text.lower()]
    return min(2, len(found))
