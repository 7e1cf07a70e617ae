"""Chats of the equality suite, their template, and by hand which of their tokens the assistant has written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

USER, ASSISTANT = "ba", "be"
"""Words that begin a turn, and that no content has."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %} ba {{ message['content'] }}"
    "{% else %} be {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} be{% endif %}"
)
Raw = dict[str, Any]


def chats(rng: random.Random, words: Sequence[str], count: int) -> list[Raw]:
    """Rows with one to three responses in a chat; some are cut."""
    rows = []
    for _ in range(count):
        turns = [turn for _ in range(rng.randint(1, 3)) for turn in _exchange(rng, words)]
        rows.append({"messages": turns})
    return rows


def chat_pairs(rng: random.Random, words: Sequence[str], count: int) -> list[Raw]:
    """Rows with a chosen and a rejected response, of one turn or several."""
    rows = []
    for _ in range(count):
        row: Raw = {"prompt": _exchange(rng, words)[:1]}
        for name in ("chosen", "rejected"):
            row[name] = [turn for _ in range(rng.randint(1, 2)) for turn in _exchange(rng, words)][1:]
        rows.append(row)
    return rows


def _exchange(rng: random.Random, words: Sequence[str]) -> list[dict[str, str]]:
    plain = [word for word in words if word not in (USER, ASSISTANT)]
    contents = [" ".join(rng.choices(plain, k=rng.randint(1, longest))) for longest in (4, 5)]
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)]


def written_by_assistant(tokenizer: Any, prompt: Sequence[int], response: Sequence[int]) -> list[bool]:
    """Whether each token of ``response`` is after the word of the assistant's turn, up to its end."""
    user, assistant = (tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in (USER, ASSISTANT))
    written, is_own = [], False
    for token in (*prompt, *response):
        written.append(is_own)
        is_own = (is_own or token == assistant) and token not in (user, tokenizer.eos_token_id)
    return written[len(prompt) :]
