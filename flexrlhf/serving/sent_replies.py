"""Replies that a client sends back in a conversation that goes on. The standard library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flexrlhf.serving.model_calls import ModelReply

_REASONING = ("reasoning_content", "reasoning")
"""Keys of a thought, which clients leave out or send back by either name."""


def same_reply(message: Mapping[str, Any], reply: ModelReply) -> bool:
    """Whether a message of the assistant in a client's conversation is a reply that it was given.

    White space at the ends of texts, keys that are null or missing, ids of calls and the white space, order and escapes
    of their arguments, which are JSON, make no difference; nor does a thought that was left out.
    """
    if message.get("role") != "assistant" or message.get("function_call"):
        return False
    thoughts = [str(message[key]).strip() for key in _REASONING if message.get(key)]
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return (
        str(message.get("content") or "").strip() == reply.content.strip()
        and all(thought == reply.reasoning.strip() for thought in thoughts)
        and [each.get("name") for each in functions] == [call.name for call in reply.calls]
        and all(
            _same_json(each.get("arguments"), call.arguments) for each, call in zip(functions, reply.calls, strict=True)
        )
    )


def _same_json(sent: object, given: str) -> bool:
    """Whether arguments that were sent back are the ones given; some clients send a value in place of its text."""
    try:
        value = json.loads(sent or "{}") if isinstance(sent, str) else sent or {}
        return bool(value == json.loads(given))
    except (ValueError, RecursionError):
        return sent == given
