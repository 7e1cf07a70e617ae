"""Calls of a model by clients in OpenAI's protocol, and its replies, whoever receives them: an episode or a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelCall:
    """One call of the model.

    messages:    a whole conversation, in OpenAI's form; contents are texts, without keys that are null
    prompt:      of ``/v1/completions``, in place of messages; None: the call is of ``/v1/chat/completions``
    tools:       JSON schemas of functions, in OpenAI's form
    stop:        texts that end the reply
    most_tokens: of the reply; None: any number
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    most_tokens: int | None = None


@dataclass(frozen=True)
class CalledFunction:
    """Call of a function in a reply. ``arguments``: JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ModelReply:
    """Reply of the model to one call.

    content:    its text, without thoughts and calls of functions
    reasoning:  its thoughts; empty without any
    calls:      of functions
    finish:     why it ended
    prompt_tokens, tokens: that the model has read, and has sampled
    """

    content: str
    reasoning: str = ""
    calls: tuple[CalledFunction, ...] = field(default=())
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
