"""Replies that clients send back."""

from __future__ import annotations

from typing import Any

import pytest

from flexrlhf.serving.model_calls import CalledFunction, ModelReply
from flexrlhf.serving.sent_replies import same_reply

REPLY = ModelReply(
    "So it is.\n", "Why?", (CalledFunction("add", '{"a": 1, "b": "\\u00e9"}'), CalledFunction("now", "{}"))
)


def sent(content: object = "So it is.", arguments: object = '{"b":"é","a":1.0}', **keys: Any) -> dict[str, Any]:
    calls = [
        {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": arguments}},
        {"id": "x", "index": 1, "function": {"name": "now", "arguments": None}},
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, "refusal": None, **keys}


@pytest.mark.parametrize(
    "message",
    [
        sent(),
        sent(" So it is. "),
        sent(arguments={"a": 1, "b": "é"}),
        sent(reasoning_content="Why?\n"),
        sent(reasoning_content=None, function_call=None),
    ],
)
def test_a_reply_that_is_sent_back_is_known(message: dict[str, Any]) -> None:
    assert same_reply(message, REPLY)


@pytest.mark.parametrize(
    "message",
    [
        sent("So is it."),
        sent(None),
        sent(arguments='{"a": 1}'),
        sent(arguments="{'a': 1"),
        sent(arguments="[" * 100_000),
        sent(reasoning="Who?"),
        sent(role="user"),
        sent(tool_calls=None),
        sent(tool_calls=sent()["tool_calls"][:1]),
        sent(tool_calls=sent()["tool_calls"][::-1]),
        sent(function_call={"name": "add", "arguments": "{}"}),
    ],
)
def test_another_message_is_none(message: dict[str, Any]) -> None:
    assert not same_reply(message, REPLY)


def test_replies_without_text_or_calls() -> None:
    assert same_reply({"role": "assistant", "content": "a"}, ModelReply("a"))
    assert same_reply(sent(None), ModelReply("", calls=REPLY.calls))
    assert not same_reply({"role": "assistant"}, ModelReply("a"))
