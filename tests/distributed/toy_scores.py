"""Functions of a user for test_learning.py, test_real_data.py, test_reward_runs.py and test_guards.py: rewards and
costs of their toy tasks, and faults."""

from __future__ import annotations

import os
import time

DEAR, TEMPTING = "ba", "de"
"""Words of one token: one that a reward counts, and one that it counts double but a cost counts too."""


def copied(prompts: list[str], responses: list[str]) -> list[float]:
    """Fraction of the prompt's words that the response has in the same position."""
    return [_share(prompt.split(), response.split()) for prompt, response in zip(prompts, responses, strict=True)]


def _share(right: list[str], found: list[str]) -> float:
    return sum(one == other for one, other in zip(right, found, strict=False)) / len(right)


def wealth(prompts: list[str], responses: list[str], num_tokens: list[int]) -> list[float]:
    """1 for each dear word, 2 for each tempting one."""
    return [response.split().count(DEAR) + 2.0 * response.split().count(TEMPTING) for response in responses]


def harm(prompts: list[str], responses: list[str]) -> list[float]:
    """1 for each tempting word."""
    return [float(response.split().count(TEMPTING)) for response in responses]


def borrowed(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """Fraction of the response's characters that the solution has, too."""
    return [
        sum(character in right for character in response) / max(len(response), 1)
        for response, right in zip(responses, answer, strict=True)
    ]


def as_the_rows_say(prompts: list[str], responses: list[str], do: list[str]) -> list[float]:
    """1 for every response, unless the data's rows say otherwise."""
    if "hang" in do:
        time.sleep(1000)
    if "crash" in do:
        os._exit(7)
    return [float("nan") if action == "nan" else 1.0 for action in do]


def lettered(prompts: list[str], responses: list[str]) -> list[float]:
    """Letters of the response that the prompt has, too, and one more."""
    return [1.0 + sum(letter in prompt for letter in text) for prompt, text in zip(prompts, responses, strict=True)]


def failing(prompts: list[str], responses: list[str]) -> list[float]:
    """No score for any response."""
    raise ValueError("out of order")
