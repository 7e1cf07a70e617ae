"""Calls of a model by clients in OpenAI's protocol, and its replies, whoever receives them: an episode or a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any, Literal, Protocol, Self

from flexrlhf.serving.token_server import Refused


@dataclass(frozen=True)
class ModelCall:
    """One call of the model.

    messages:    a whole conversation, in OpenAI's form: ``role``, ``content`` (always a text), and ``name``,
                 ``reasoning_content``, ``tool_calls``, ``tool_call_id`` if they are there
    prompt:      of ``/v1/completions``, in place of messages; None: the call is of ``/v1/chat/completions``
    tools:       JSON schemas of functions, in OpenAI's form
    stop:        texts that end the reply
    most_tokens: of the reply; None: any number
    sampling:    ``temperature``, ``top_p``, ``top_k`` and ``seed``, if the server leaves them to its clients
    prompt_ids:  its tokens in place of an empty prompt, if the server takes them
    likeliest:   tokens of the prompt are scored, with so many likeliest ones at each place; None: they are not
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    most_tokens: int | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] = ()
    likeliest: int | None = None

    @property
    def text(self) -> str:
        """The call as JSON, which ``read`` reads, without what it does not have."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, (), {})}
        return json.dumps(given, sort_keys=True)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the call that ``text`` is of."""
        found: dict[str, Any] = json.loads(text)
        lists: dict[str, Any] = {name: tuple(each) for name, each in found.items() if isinstance(each, list)}
        return cls(**{**found, **lists})


@dataclass(frozen=True)
class CalledFunction:
    """Call of a function in a reply. ``arguments``: JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ScoredToken:
    """Token of a prompt, or behind it.

    text:       of the token alone
    logprob:    None of the first one
    likeliest:  the likeliest tokens of its place, with their log-probs
    """

    text: str
    logprob: float | None
    likeliest: Mapping[str, float]


@dataclass(frozen=True)
class ModelReply:
    """Reply of the model to one call.

    content:    its text, without thoughts and calls of functions
    reasoning:  its thoughts; empty without any
    calls:      of functions
    finish:     why it ended
    prompt_tokens, tokens: that the model has read, and has sampled
    scored:     tokens of the prompt and of the reply, if the call scores them
    """

    content: str
    reasoning: str = ""
    calls: tuple[CalledFunction, ...] = field(default=())
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    prompt_tokens: int = 0
    tokens: int = 0
    scored: tuple[ScoredToken, ...] = ()


class CallRefused(Refused):
    """Call that has no reply.

    param:  of the request that is to blame; None: none alone is.
    code:   of OpenAI's, by which programs tell errors apart.
    kind:   of error, one of OpenAI's.
    """

    def __init__(
        self,
        status: HTTPStatus,
        sentence: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(status, sentence)
        self.param, self.code, self.kind = param, code, kind


class Policy(Protocol):
    """Source of replies. Many threads call it at the same time."""

    def knows(self, key: str) -> bool:
        """Return whether ``key`` may call. Compares in constant time if strangers can try."""
        ...

    def reply(self, key: str, call: ModelCall) -> ModelReply:
        """Return the reply to a call, and wait for it in the thread of its request. Raises CallRefused.

        A client that is gone is noticed only when its reply is sent. So every wait has to end by itself: with a reply,
        or with CallRefused once the episode has ended or its deadline has passed.
        """
        ...

    def refused(self, key: str, sentence: str) -> None:
        """Receive that a request with a known key was refused before it became a call."""
        ...
