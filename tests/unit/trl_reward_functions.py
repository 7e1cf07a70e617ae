"""Functions in TRL's form for test_reward_signatures.py, which names this file as a user would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Chat = list[dict[str, str]]


def lengths(completions: list[str], **kwargs: Any) -> list[float]:
    """Return the lengths, as in the first example of TRL's documentation."""
    return [float(len(completion)) for completion in completions]


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(completion == each) for completion, each in zip(completions, answer, strict=True)]


def right_of_chats(prompts: list[Chat], completions: list[Chat], answer: list[str]) -> list[float]:
    assert all(len(chat) == 1 and chat[0]["role"] == "assistant" for chat in completions), completions
    return [
        float(chat[0]["content"] == each) + 10 * len(prompt)
        for prompt, chat, each in zip(prompts, completions, answer, strict=True)
    ]


def whatever_comes(**kwargs: Any) -> list[float]:
    assert set(kwargs) == {"prompts", "completions", "completion_ids", "num_tokens", "answer"}, kwargs
    return [float(len(prompt)) for prompt in kwargs["prompts"]]


def sums(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids)) for ids in completion_ids]


def sometimes(completions: list[str], **kwargs: Any) -> list[float | None]:
    """Return None, which in TRL means not applicable, where the completion is no number."""
    return [float(completion) if completion.isdigit() else None for completion in completions]


def never(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None] * len(completions)


def per_token(completions: list[str], num_tokens: list[int]) -> list[list[float] | None]:
    return [[1.0] * count if text else None for text, count in zip(completions, num_tokens, strict=True)]


def of_state(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    return [float(trainer_state.global_step)] * len(completions)


def neither(text: str) -> float:
    return float(len(text))


def wrapped(function: Callable[..., list[float]]) -> Callable[..., list[float]]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> list[float]:
        return function(*args, **kwargs)

    return call


@wrapped
def decorated(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


@wrapped
def decorated_neither(text: str, **kwargs: Any) -> list[float]:
    return [0.0]
