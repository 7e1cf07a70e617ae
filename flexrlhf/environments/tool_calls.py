"""Calls of tools in the text of a turn. Worker processes load this: the standard library alone.

| form        | a call                                                                                            |
|-------------|---------------------------------------------------------------------------------------------------|
| ``hermes``  | ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Qwen and Hermes write it         |
| ``llama3``  | ``{"name": ..., "parameters": {...}}``, several with ``;`` between, also behind ``<|python_tag|>`` |
| another one | a match of this regular expression with the groups ``name``, which the call of an only tool need  |
|             | not have, and, in JSON, ``arguments``; further groups with names are arguments that are texts     |

Calls inside of thoughts, ``<think>...</think>``, are none, except for a regular expression, which finds what it finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"
_LLAMA_BARE = re.compile(r'\s*\{\s*"(name|parameters|arguments)"\s*:')
ONLY = "(the only tool)"
"""Name in a call by an expression without the group ``name``."""
_SHOWN = 200
"""Characters of a call that an error quotes."""


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool: its name, and its arguments by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class _FailedCall(ValueError):
    """Text that begins a call and is none."""


def parse_calls(text: str, form: str) -> tuple[list[ToolCall], list[str]]:
    """Return the calls in the text of a turn, and a sentence for each one that cannot be read.

    A call without arguments has none; a text without calls has neither calls nor errors.
    """
    found = {"hermes": _hermes, "llama3": _llama3}.get(form)
    each = _by_expression(text, form) if found is None else found(_without_thoughts(text))
    parsed = list(each)
    return (
        [call for call in parsed if isinstance(call, ToolCall)],
        [str(error) for error in parsed if isinstance(error, _FailedCall)],
    )


def _without_thoughts(text: str) -> str:
    """Return the text behind the last thought; nothing of a thought that has no end."""
    before, end, after = text.rpartition("</think>")
    return (after if end else before + after).partition("<think>")[0]


def _hermes(text: str) -> Iterator[ToolCall | _FailedCall]:
    for found in _HERMES.finditer(text):
        body, end = found.groups()
        if end:
            yield _read(body, "arguments")
        else:
            yield _FailedCall(f"the tool call has no </tool_call> at its end: {_quoted(body)}")


def _llama3(text: str) -> Iterator[ToolCall | _FailedCall]:
    _, tag, rest = text.partition(_LLAMA_TAG)
    if not tag and not _LLAMA_BARE.match(text):
        return
    decoder, rest = json.JSONDecoder(), (rest if tag else text).strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            yield _no_json(rest, error)
            return
        yield _call(value, "parameters", rest[:end])
        rest = rest[end:].lstrip().removeprefix(";").removeprefix(_LLAMA_TAG).lstrip()


def _by_expression(text: str, expression: str) -> Iterator[ToolCall | _FailedCall]:
    pattern = re.compile(expression, re.DOTALL)
    for found in pattern.finditer(text):
        groups = {key: text.strip() for key, text in found.groupdict().items() if text is not None}
        name, arguments = groups.pop("name", ""), groups.pop("arguments", "")
        if "name" not in pattern.groupindex:
            name = ONLY
        try:
            value = json.loads(arguments) if arguments else groups
        except (ValueError, RecursionError) as error:
            yield _no_json(arguments, error)
            continue
        yield _call({"name": name, "arguments": value}, "arguments", found.group())


def _read(body: str, key: str) -> ToolCall | _FailedCall:
    try:
        return _call(json.loads(body), key, body)
    except (ValueError, RecursionError) as error:
        return _no_json(body, error)


def _call(value: object, key: str, text: str) -> ToolCall | _FailedCall:
    """Return a call of its JSON value. ``key``: its usual key of the arguments."""
    if not isinstance(value, dict):
        return _FailedCall(f"the tool call is no JSON object: {_quoted(text)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _FailedCall(f"the tool call has no name: {_quoted(text)}")
    given = value.get(key, value.get("arguments" if key == "parameters" else "parameters"))
    arguments = {} if given is None else given
    if not isinstance(arguments, dict):
        return _FailedCall(f"the {key} of the call of {name} are no JSON object: {_quoted(text)}")
    return ToolCall(name, arguments)


def _no_json(text: str, error: Exception) -> _FailedCall:
    reason = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else "too deep or long"
    return _FailedCall(f"the tool call is no JSON ({reason}): {_quoted(text)}")


def _quoted(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]} ..."
