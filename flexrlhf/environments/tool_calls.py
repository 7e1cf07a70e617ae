"""Calls of tools in the text of a turn. Worker processes load this: the standard library alone.

A form is one of ``flexrlhf/environments/call_forms.py``, or a regular expression: each match is a call, with the groups
``name``, which the call of an only tool need not have, and, in JSON, ``arguments``; further groups with names are
arguments that are texts. Calls inside of thoughts are none, except for an expression, which finds what it finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexrlhf.environments.call_forms import (
    THINK,
    CallRead,
    FailedCall,
    ReplyParts,
    TextParameters,
    ToolCall,
    no_json,
    read_call,
    reply_parts,
    split_thoughts,
)
from flexrlhf.serving.model_calls import CalledFunction

ONLY = "(the only tool)"
"""Name in a call by an expression without the group ``name``."""


def parse_calls(text: str, form: str, parameters: TextParameters | None = None) -> tuple[list[ToolCall], list[str]]:
    """Return the calls in the text of a turn, and a sentence for each one that cannot be read.

    A call without arguments has none; a text without calls has neither calls nor errors.
    parameters:  the ones whose values are texts, by tool, for forms whose values have no types
    """
    calls = _parts(text, form, False, parameters or {}).calls
    return (
        [call for call in calls if isinstance(call, ToolCall)],
        [str(error) for error in calls if isinstance(error, FailedCall)],
    )


def read_reply(
    text: str, form: str, tools: Sequence[Mapping[str, Any]] = (), is_thinking: bool = False
) -> tuple[str, str, tuple[CalledFunction, ...]]:
    """Return the content, the thoughts and the calls of a reply's text.

    The content has the text of calls that cannot be read, and of all calls by a regular expression, which are a part
    of a sentence. Without thoughts and calls it is the text itself.
    form:         as the setting ``tool_format``
    tools:        JSON schemas of the functions, in OpenAI's form
    is_thinking:  whether the prompt ends inside of a thought (``ends_in_thought``)
    """
    functions = [tool.get("function", tool) for tool in tools]
    parts = _parts(text, form, is_thinking, {each.get("name", ""): _text_parameters(each) for each in functions})
    only = [each.get("name", "") for each in functions]
    calls = list[CalledFunction]()
    for call in parts.calls:
        if isinstance(call, ToolCall):
            name = only[0] if call.name == ONLY and len(only) == 1 else call.name
            try:
                calls.append(CalledFunction(name, json.dumps(call.arguments, allow_nan=False)))
            except (ValueError, RecursionError):
                # NaN is no JSON for others
                return text, "", ()
    return parts.content, parts.reasoning, tuple(calls)


def _parts(text: str, form: str, is_thinking: bool, parameters: TextParameters) -> ReplyParts:
    found = reply_parts(text, form, is_thinking, parameters)
    return found or ReplyParts(*split_thoughts(text, THINK, is_thinking), tuple(_by_expression(text, form)))


def _by_expression(text: str, expression: str) -> Iterator[CallRead]:
    pattern = re.compile(expression, re.DOTALL)
    for found in pattern.finditer(text):
        groups = {key: text.strip() for key, text in found.groupdict().items() if text is not None}
        name, arguments = groups.pop("name", ""), groups.pop("arguments", "")
        if "name" not in pattern.groupindex:
            name = ONLY
        try:
            value = json.loads(arguments) if arguments else groups
        except (ValueError, RecursionError) as error:
            yield no_json(arguments, error)
            continue
        yield read_call({"name": name, "arguments": value}, "arguments", found.group())


def _text_parameters(function: Mapping[str, Any]) -> set[str]:
    """Return the parameters of a function that are texts, by its JSON schema."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    return {name for name, schema in properties.items() if _types(schema) - {"null"} == {"string"}}


def _types(schema: Any) -> set[str]:
    """Return the types of a value by its schema."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    own = {given} if isinstance(given, str) else {each for each in given or () if isinstance(each, str)}
    return own.union(*(_types(each) for key in ("anyOf", "oneOf") for each in schema.get(key) or ()))
