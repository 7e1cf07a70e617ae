"""Checks of what an environment returns. Worker processes load this: the standard library alone.

Results are plain texts and numbers: an object of a user's class would load the user's code where it is received.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flexrlhf.environments.base import Turn
from flexrlhf.user_code.call_failures import BadReply

MAX_CHARACTERS = 1 << 20
"""Characters of one reply, roles included. A longer one is no reply that a model could read."""
MAX_MESSAGES = 4096
"""Messages of one reply."""
MAX_OF_EPISODE = 1 << 23
"""Characters of all replies of an episode."""
ADDRESS = re.compile(r"<\w(?:[^<>\n]|<\w+>){0,300}? at 0x[0-9a-fA-F]+")
"""Beginning of an object's representation with its address, which differs in every process."""


def read_turn(value: Any) -> tuple[tuple[tuple[str, str], ...], float, bool]:
    """Return messages, reward and end of a turn. Raises BadReply."""
    if not isinstance(value, Turn):
        raise BadReply(f"step returned {shown_value(value)} instead of a Turn(messages, reward, is_done)")
    if value.is_done not in (True, False):
        raise BadReply(f"is_done is {shown_value(value.is_done)} instead of True or False")
    return read_messages(value.messages), read_reward(value.reward), bool(value.is_done)


def read_reward(value: Any) -> float:
    """Return a reward as a number. Raises BadReply."""
    try:
        reward = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise BadReply(f"reward is {shown_value(value)} instead of a finite number")
    return reward


def read_messages(value: Any) -> tuple[tuple[str, str], ...]:
    """Return messages as (role, content), a text that is not empty with role "". Raises BadReply."""
    if value is None or isinstance(value, str):
        text = "" if value is None else read_text(value)
        return (("", text),) if text else ()
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise BadReply(f"messages are {shown_value(value)} instead of a text or a list of messages")
    return tuple(_bounded(map(_message, value)))


def num_characters(messages: Iterable[tuple[str, str]]) -> int:
    """Return the characters of messages, their roles included."""
    return sum(len(role) + len(content) for role, content in messages)


def _bounded(messages: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield messages. Raises BadReply for too many, and for too many characters together."""
    length = 0
    for number, message in enumerate(messages, 1):
        length += num_characters([message])
        if length > MAX_CHARACTERS:
            raise BadReply(f"messages have {length} characters, roles counted; at most {MAX_CHARACTERS} are read")
        if number > MAX_MESSAGES:
            raise BadReply(f"a reply has more than {MAX_MESSAGES} messages")
        yield message


def read_text(value: str) -> str:
    """Return a plain text that can be encoded, is not too long and has no address of an object. Raises BadReply."""
    # checks of a subclass would be its own
    text = str.__str__(value)
    if len(text) > MAX_CHARACTERS:
        raise BadReply(f"a text has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadReply(f"a text has a character that is none, {text[error.start]!r}, at {error.start}") from None
    if (found := ADDRESS.search(text)) is not None:
        raise BadReply(f"a text has {found.group()!r:.80}, the address of an object, which no other process repeats")
    return text


def _message(value: Any) -> tuple[str, str]:
    role = value.get("role") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(role, str) or not role:
        raise BadReply(f"a message is {shown_value(value)} instead of a mapping with role and content")
    content = value.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "".join(_parts(content))
    if not isinstance(content, str):
        raise BadReply(f"the content of a message is {shown_value(content)} instead of a text")
    return read_text(role), read_text(content)


def _parts(values: Sequence[Any]) -> Iterator[str]:
    """Yield the texts of a message's parts. Raises BadReply for too many."""
    length = 0
    for value in values:
        text = value.get("text") if isinstance(value, Mapping) else value
        if not isinstance(text, str):
            raise BadReply(f"a part of a message is {shown_value(value)} instead of a text")
        # an empty part counts as well
        length += len(plain := str.__str__(text)) + 1
        if length > 2 * MAX_CHARACTERS:
            raise BadReply(f"the parts of a message have too many characters; at most {MAX_CHARACTERS} are read")
        yield plain


def shown_value(value: Any) -> str:
    """Return a value in few characters, also a long one."""
    if isinstance(value, str | bytes) and len(value) > 60:
        value = value[:60]
    return f"{value!r:.60} ({type(value).__name__})"
