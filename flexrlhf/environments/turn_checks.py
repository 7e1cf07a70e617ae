"""Checks of what an environment returns. Worker processes load this: the standard library alone.

Results are plain texts and numbers: an object of a user's class would load the user's code where it is received.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flexrlhf.environments.base import Turn
from flexrlhf.user_code.call_failures import BadReply

MAX_CHARACTERS = 1 << 20
"""Characters of one reply. A longer one is no reply that a model could read."""


def read_turn(value: Any) -> tuple[tuple[tuple[str, str], ...], float, bool]:
    """Return messages, reward and end of a turn. Raises BadReply."""
    if not isinstance(value, Turn):
        raise BadReply(f"step returned {_shown(value)} instead of a Turn(messages, reward, is_done)")
    if value.is_done not in (True, False):
        raise BadReply(f"is_done is {_shown(value.is_done)} instead of True or False")
    return read_messages(value.messages), read_reward(value.reward), bool(value.is_done)


def read_reward(value: Any) -> float:
    """Return a reward as a number. Raises BadReply."""
    try:
        reward = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise BadReply(f"reward is {_shown(value)} instead of a finite number")
    return reward


def read_messages(value: Any) -> tuple[tuple[str, str], ...]:
    """Return messages as (role, content), a text that is not empty with role "". Raises BadReply."""
    if value is None or isinstance(value, str):
        text = read_text(value or "")
        return (("", text),) if text else ()
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, bytes):
        raise BadReply(f"messages are {_shown(value)} instead of a text or a list of messages")
    messages = tuple(map(_message, value))
    if (length := sum(len(content) for _, content in messages)) > MAX_CHARACTERS:
        raise BadReply(f"messages have {length} characters; at most {MAX_CHARACTERS} are read")
    return messages


def read_text(value: str) -> str:
    """Return a text that can be encoded, and is not too long. Raises BadReply."""
    if len(value) > MAX_CHARACTERS:
        raise BadReply(f"a text has {len(value)} characters; at most {MAX_CHARACTERS} are read")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadReply(f"a text has a character that is none, {value[error.start]!r}, at {error.start}") from None
    return str.__str__(value)


def _message(value: Any) -> tuple[str, str]:
    role = value.get("role") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(role, str) or not role:
        raise BadReply(f"a message is {_shown(value)} instead of a mapping with role and content")
    content = value.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(map(_part, content))
    if not isinstance(content, str):
        raise BadReply(f"the content of a message is {_shown(content)} instead of a text")
    return read_text(role), read_text(content)


def _part(value: Any) -> str:
    text = value.get("text") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise BadReply(f"a part of a message is {_shown(value)} instead of a text")
    return text


def _shown(value: Any) -> str:
    """Return a value in few characters, also a long one."""
    if isinstance(value, str | bytes) and len(value) > 60:
        value = value[:60]
    return f"{value!r:.60} ({type(value).__name__})"
