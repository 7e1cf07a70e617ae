"""Replies of a model in OpenAI's protocol: whole, as server-sent events, and errors."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from flexrlhf.serving.model_calls import CallRefused, ModelCall, ModelReply
from flexrlhf.serving.token_server import Refused

ID_LETTERS = 9
"""Length of the id of a function's call, which some chat templates require."""


def reply_message(call: ModelCall, reply: ModelReply) -> dict[str, Any]:
    """Return a reply as the message of later calls, as ``ModelCall`` has messages.

    Ids follow from the conversation, so that a replay has the same ones.
    """
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        digest = _digest(call)
        message["tool_calls"] = [
            {
                "id": hashlib.sha256(f"{digest} {place}".encode()).hexdigest()[:ID_LETTERS],
                "type": "function",
                "function": {"name": called.name, "arguments": called.arguments},
            }
            for place, called in enumerate(reply.calls)
        ]
    return message


def reply_body(model: str, calls: Sequence[ModelCall], replies: Sequence[ModelReply]) -> str:
    """Return the JSON of the replies to the calls of a request."""
    if (first := calls[0]).prompt is None:
        choices = [_choice(0, replies[0], message=_message_sent(first, replies[0]))]
    else:
        choices = [_choice(place, reply, text=_text_sent(reply)) for place, reply in enumerate(replies)]
    kind = "chat.completion" if first.prompt is None else "text_completion"
    return json.dumps(_head(model, first, kind) | {"choices": choices, "usage": _usage(replies)})


def reply_events(model: str, calls: Sequence[ModelCall], replies: Sequence[ModelReply], has_usage: bool) -> str:
    """Return whole replies as server-sent events: of each one with all of it, and one with its end.

    The numbers of tokens follow if ``has_usage``.
    """
    choices = list[Mapping[str, Any]]()
    for place, (call, reply) in enumerate(zip(calls, replies, strict=True)):
        if call.prompt is None:
            message = _message_sent(call, reply)
            for number, called in enumerate(message.get("tool_calls", [])):
                called["index"] = number
            parts: list[dict[str, Any]] = [{"delta": message}, {"delta": {}}]
        else:
            parts = [{"text": _text_sent(reply)}, {"text": "", "logprobs": None}]
        choices += [_choice(place, reply, finish_reason=None, **parts[0]), _choice(place, reply, **parts[1])]
    head = _head(model, calls[0], "chat.completion.chunk" if calls[0].prompt is None else "text_completion")
    events: list[Mapping[str, Any]] = [head | {"choices": [choice]} for choice in choices]
    if has_usage:
        events.append(head | {"choices": [], "usage": _usage(replies)})
    return "".join(f"data: {line}\n\n" for line in (*map(json.dumps, events), "[DONE]"))


def error_body(refusal: Refused) -> str:
    """Return the JSON of a refusal."""
    known = refusal if isinstance(refusal, CallRefused) else CallRefused(refusal.status, str(refusal))
    error = {"message": str(known), "type": known.kind, "param": known.param, "code": known.code}
    return json.dumps({"error": error})


def models_body(model: str, place: str | None) -> str:
    """Return the JSON of the list of models, or of the one that is named in a path."""
    found = {"id": model, "object": "model", "created": 0, "owned_by": "flexrlhf"}
    return json.dumps({"object": "list", "data": [found]} if place is None else found)


def _message_sent(call: ModelCall, reply: ModelReply) -> dict[str, Any]:
    """Return the message in the form of OpenAI's models, whose calls of functions have null in place of no text."""
    return reply_message(call, reply) | ({"content": None} if reply.calls and not reply.content else {})


def _digest(call: ModelCall) -> str:
    content = json.dumps([call.messages, call.prompt, call.prompt_ids, call.tools], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _head(model: str, call: ModelCall, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if call.prompt is None else "cmpl"
    return {"id": f"{prefix}-{_digest(call)[:24]}", "object": kind, "created": int(time.time()), "model": model}


def _text_sent(reply: ModelReply) -> str:
    """Return the text of a reply, behind its prompt if that is scored."""
    return "".join(each.text for each in reply.scored) or reply.content


def _choice(place: int, reply: ModelReply, **content: Any) -> dict[str, Any]:
    """Return a reply as the choice of a number."""
    return {"index": place, "logprobs": _logprobs(reply), "finish_reason": reply.finish, **content}


def _logprobs(reply: ModelReply) -> dict[str, Any] | None:
    """Return the scores of tokens in the form of ``/v1/completions``; None without any."""
    if not reply.scored:
        return None
    ends = list(accumulate(len(each.text) for each in reply.scored))
    return {
        "tokens": [each.text for each in reply.scored],
        "token_logprobs": [each.logprob for each in reply.scored],
        "top_logprobs": [None if each.logprob is None else dict(each.likeliest) for each in reply.scored],
        "text_offset": [0, *ends[:-1]],
    }


def _usage(replies: Sequence[ModelReply]) -> dict[str, int]:
    numbers = {
        "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
        "completion_tokens": sum(reply.tokens for reply in replies),
    }
    return {**numbers, "total_tokens": sum(numbers.values())}
