"""Keys of messages and columns of rows, in addition to roles, contents and those of a form, that other tools read.

Each changes what is trained on, so it is read here or refused with a sentence. All other keys are given to the chat
template if it reads them; ``flexrlhf data`` lists those that nothing reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexrlhf.data.files import Row, json_type
from flexrlhf.data.row_layout import checked_text
from flexrlhf.errors import UserError, shown

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a thought in front of an answer; a template reads one of them, whichever a row has."""
FLAGS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask")
"""Keys that say whether a turn is trained on."""
CALLS = ("tool_calls", "function_call")
"""Keys of calls of tools."""
SYSTEM = ("system", "system_prompt")
"""Columns of a system prompt."""
TOOLS = ("tools", "functions")
"""Columns of the tools that a template writes into the prompt."""
OPTIONS = "chat_template_kwargs"
"""Column of variables of a template."""
DOCUMENTS = "documents"
"""Column of texts that a template writes into the prompt, and its variable of them."""
PART = "content."
"""Prefix of the keys of a part of a content."""
_MEDIA = "models here read text alone: remove it"
_PARTS = "only whole turns can be left out of training: give weight 0 or 1"
_BEGUN = "only the last message of 'prompt' is gone on with: move it there, or remove the key"
_COLUMN = "it is given once for all messages: make it a column of the row"
_MEDIA_NAMES = ("images", "image", "videos", "video", "audios", "audio")
REFUSED_KEYS = {
    **dict.fromkeys((*_MEDIA_NAMES, "input_audio"), _MEDIA),
    **dict.fromkeys(("train_detail", "training_detail", *(PART + flag for flag in FLAGS)), _PARTS),
    **dict.fromkeys(("prefix", "prefill", "partial"), _BEGUN),
    **dict.fromkeys((*TOOLS, DOCUMENTS, OPTIONS), _COLUMN),
}
"""Keys of a message with a value that is refused, and what to do."""
REFUSED_COLUMNS = {
    **dict.fromkeys(_MEDIA_NAMES, _MEDIA),
    "history": "make it a part of 'messages', or remove it",
    "chat_template": "a run has one template: name its file in data.chat_template",
}
"""Columns with a value that is refused, and what to do."""
MOST_DEPTH = 64
"""Most lists and objects inside one another that a template is given."""
EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values that a column has if it has none."""
EPISODE_COLUMNS = (DOCUMENTS, "history")
"""Columns that an environment may read under names that else have a meaning here."""
_FIXED = ("conversation", "conversations", "messages", "tools", "chat_template", "tokenize", "add_generation_prompt")
_CALL_OPTIONS = ("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
_OWN_OPTIONS = (*_FIXED, *_CALL_OPTIONS, "continue_final_message", "return_assistant_tokens_mask")
"""Variables of a template, and arguments of its call, that are set here."""


@dataclass(frozen=True)
class RowValues:
    """Values that a row gives to a chat template in addition to its messages.

    tools:    JSON schemas of functions
    options:  variables of the template
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.tools or self.options)


def read_keys(others: Mapping[str, Any], name: str, role: str) -> tuple[dict[str, Any], bool]:
    """Return what a message's other keys give to a template, calls and thoughts under one name each, and whether the
    message may be trained on. Raises UserError."""
    given = {key: value for key, value in others.items() if key not in (*REASONING, *FLAGS, *CALLS)}
    for key, value in given.items():
        _check_texts(value, f"{key!r} of {name}")
        advice = REFUSED_KEYS.get(key) or REFUSED_KEYS.get(key.removeprefix(PART))
        if advice and (value or key.removeprefix(PART) in FLAGS):
            raise UserError(f"{name} has {key!r}, which is not read: {advice}")
    if thought := _thought(others, name, role):
        given[REASONING[0]] = thought
    if calls := _calls(others, name, role):
        given[CALLS[0]] = calls
    return given, _is_trained(others, name, role)


def row_values(row: Row) -> RowValues:
    """Return what a row's columns give to a template. Raises UserError for columns that are refused."""
    for column, advice in REFUSED_COLUMNS.items():
        if row.get(column):
            raise UserError(f"{column!r} has a value, which is not rendered; {advice}")
    tools = tuple(tool for column in TOOLS for tool in _tools(row.get(column), column))
    options = dict(_options(row.get(OPTIONS)))
    if documents := row.get(DOCUMENTS):
        options[DOCUMENTS] = documents
    _check_texts([*tools, options], "a value for the chat template")
    return RowValues(tools, options)


def with_texts(value: Any, change: Callable[[str], str], depth: int = MOST_DEPTH) -> Any:
    """Return a value of JSON with all its texts changed, keys included. Raises UserError for a deeply nested one."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, list | tuple | dict):
        return value
    if not depth:
        raise UserError(f"a value for the chat template is nested deeper than {MOST_DEPTH}")
    if isinstance(value, dict):
        return {with_texts(key, change): with_texts(each, change, depth - 1) for key, each in value.items()}
    return [with_texts(each, change, depth - 1) for each in value]


def texts_of(value: Any) -> list[str]:
    """Return all texts in a value of JSON, keys included."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    with_texts(value, keep)
    return found


def system_prompt(row: Row) -> str | None:
    """Return the system prompt in a column of a row; None without one. Raises UserError for two, or no text."""
    found = {column: checked_text(row[column], repr(column)) for column in SYSTEM if row.get(column)}
    if len(set(found.values())) > 1:
        raise UserError(f"{' and '.join(map(repr, found))} are two system prompts; remove one")
    return next((text for text in found.values() if text.strip()), None)


def read_call(value: object, name: str) -> dict[str, Any]:
    """Return a call of a tool as ``{type, id, function: {name, arguments}}``, the arguments as an object."""
    if not isinstance(value, dict):
        raise UserError(f"{name} must be an object, found {json_type(value)}")
    nested = value.get("function")
    inner = nested if isinstance(nested, dict) else value
    function = checked_text(inner.get("name"), f"the name of {name}")
    call = {"name": function, "arguments": _arguments(inner.get("arguments"), f"the arguments of {name}")}
    _check_texts(call, name)
    identity = {"id": value["id"]} if value.get("id") is not None else {}
    return {"type": "function", **identity, "function": call}


def from_json(value: object, name: str) -> Any:
    """Return a value, or what it is as JSON if it is a text. Raises UserError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(checked_text(value, name))
    except (ValueError, RecursionError):
        raise UserError(f"{name} must be JSON, found {shown(value)}") from None


def _check_texts(value: object, name: str) -> None:
    for text in texts_of(value):
        checked_text(text, name)


def _thought(others: Mapping[str, Any], name: str, role: str) -> str:
    found = {key: checked_text(others[key], f"{key!r} of {name}") for key in REASONING if others.get(key) is not None}
    texts = {text for text in found.values() if text.strip()}
    if len(texts) > 1:
        raise UserError(f"{name} has {' and '.join(map(repr, found))}, which differ; remove one")
    if texts and role != "assistant":
        raise UserError(f"{name} has {next(iter(found))!r}, but is of the {role}; only the assistant thinks")
    return next(iter(texts), "")


def _is_trained(others: Mapping[str, Any], name: str, role: str) -> bool:
    """Return whether a message may be trained on: whether no key says that it is not."""
    flags = {key: others[key] for key in FLAGS if others.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1) or not isinstance(value, int | float):
            raise UserError(f"{key!r} of {name} must be 0 or 1 (false or true), found {shown(value)}")
        if value and role != "assistant":
            raise UserError(f"{name} has {key} {shown(value)}, but only turns of the assistant are trained on")
    if len(set(map(bool, flags.values()))) > 1:
        raise UserError(f"{name} has {' and '.join(map(repr, flags))}, which differ; remove one")
    return all(flags.values())


def _calls(others: Mapping[str, Any], name: str, role: str) -> list[dict[str, Any]]:
    found = [key for key in CALLS if others.get(key)]
    if not found:
        return []
    if role != "assistant":
        raise UserError(f"{name} has {found[0]!r}, but is of the {role}; only the assistant calls tools")
    if len(found) > 1:
        raise UserError(f"{name} has {' and '.join(map(repr, found))}; remove one")
    value = from_json(others[found[0]], f"{found[0]!r} of {name}")
    calls = value if isinstance(value, list) else [value]
    return [read_call(call, f"call {number} of {name}") for number, call in enumerate(calls, start=1)]


def _arguments(value: object, name: str) -> dict[str, Any]:
    read = from_json(value, name) if value not in (None, "") else {}
    if not isinstance(read, dict):
        raise UserError(f"{name} must be an object, or one as text, found {json_type(read)}")
    return read


def _tools(value: object, column: str) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a column: a list of objects, or JSON of it."""
    read = from_json(value or [], repr(column)) or []
    if not isinstance(read, list):
        raise UserError(f"{column!r} must be a list of tools, found {json_type(read)}")
    tools = [from_json(tool, f"a tool of {column!r}") for tool in read]
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict) or not isinstance(tool_name(tool), str):
            raise UserError(f"tool {number} of {column!r} must be an object with a name, found {shown(tool)}")
    return tools if column != "functions" else [{"type": "function", "function": tool} for tool in tools]


def tool_name(tool: Mapping[str, Any]) -> Any:
    """Return the name of a tool, which may be the function itself."""
    inner = tool.get("function")
    return (inner if isinstance(inner, dict) else tool).get("name")


def _options(value: object) -> Mapping[str, Any]:
    read = from_json(value or {}, repr(OPTIONS)) or {}
    if not isinstance(read, dict):
        raise UserError(f"{OPTIONS!r} must be an object, found {json_type(read)}")
    for key in read:
        if key in _OWN_OPTIONS:
            raise UserError(f"{OPTIONS!r} has {key!r}, which the run itself sets; remove it")
    return {key: value for key, value in read.items() if value is not None}
