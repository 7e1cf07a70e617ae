"""Values of rows as a chat template reads them: further keys of messages, tools, and variables.

A template drops what it does not know. Thoughts, calls and tools that it leaves out are refused, other keys are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from flexrlhf.data.known_keys import CALLS, DOCUMENTS, REASONING, RowValues, texts_of, tool_name
from flexrlhf.data.messages import Message, is_assistant
from flexrlhf.errors import UserError

_THOUGHT, _CALLED = REASONING[0], CALLS[0]
_CALL = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"key": "value"}}}
Render = Callable[[list[dict[str, Any]]], str]


class TemplateKeys:
    """Keys of messages that a template reads, by the names in its source.

    render:  renders messages; raises UserError if the template refuses them
    """

    def __init__(self, source: str, render: Render) -> None:
        self._source, self._render = source, render
        self.reads = lru_cache(maxsize=None)(self._reads)

    def messages(self, turns: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages with the keys that the template reads."""
        return [self._message(turn) for turn in turns]

    def unread(self, text: str, turns: Sequence[Message]) -> Iterator[str]:
        """Yield names of keys that are not in the rendered ``text``. Raises UserError for a thought, if the template
        reads none."""
        for turn in turns:
            thought = turn.given.get(_THOUGHT, "").strip()
            if thought and self.thought is None and not _is_in(text, thought):
                raise UserError(
                    f"the row has a thought ({', '.join(REASONING)}), which the chat template does not read: make it a "
                    f"part of the content, or name a template that reads it in data.chat_template"
                )
            for key in turn.given:
                value = turn.given[key]
                is_written = self.reads(key) and (not isinstance(value, str) or _is_in(text, value))
                if key not in (_THOUGHT, _CALLED, "content") and not is_written:
                    yield f"key {key!r} of messages"

    def is_variable(self, name: str) -> bool:
        """Whether the template has a variable of this name."""
        return re.search(rf"(?<![\w.'\"]){re.escape(name)}(?![\w'\"])", self._source) is not None

    @cached_property
    def thought(self) -> str | None:
        """Key under which the template reads thoughts; None if it reads none."""
        return next((key for key in REASONING if self.reads(key)), None)

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the template takes arguments of calls as objects; else it takes them as texts."""
        try:
            self._render(_called(_CALL))
        except UserError:
            try:
                self._render(_called(_as_text(_CALL)))
            except UserError:
                return True
            return False
        return True

    def _reads(self, key: str) -> bool:
        return re.search(rf"[.'\"]{re.escape(key)}(?!\w)", self._source) is not None

    def _message(self, turn: Message) -> dict[str, Any]:
        given = {key: value for key, value in turn.given.items() if key == "content" or self.reads(key)}
        given.pop(_THOUGHT, None)
        if _THOUGHT in turn.given and self.thought is not None:
            given[self.thought] = turn.given[_THOUGHT]
        if _CALLED in given and not self.takes_objects:
            given[_CALLED] = list(map(_as_text, given[_CALLED]))
        return {"role": turn.role, "content": turn.content, **given}


def check_written(text: str, turns: Sequence[Message], values: RowValues, keys: TemplateKeys) -> tuple[str, ...]:
    """Return the names of what a rendered row leaves out of its turns and values.

    Raises UserError for tools, documents, calls, texts next to calls, and turns of a user or tool that are not in it.
    """
    for tool in values.tools:
        if tool_name(tool) not in text:
            raise UserError(
                f"the chat template does not write tools into a prompt, such as {tool_name(tool)!r}: name one that "
                f"does in data.chat_template, or remove the column"
            )
    if DOCUMENTS in values.options and not keys.is_variable(DOCUMENTS):
        raise UserError(
            f"the chat template does not write {DOCUMENTS!r} into a prompt: name one that does in data.chat_template, "
            f"or remove the column"
        )
    for turn in turns:
        if _CALLED in turn.given:
            _check_calls(text, turn)
        # templates may change a text, and follow a system prompt without writing it
        if turn.role in ("user", "tool") and not _is_in(text, max(turn.content.split(), key=len, default="")):
            raise UserError(
                f"the chat template leaves out the text of a turn of the {turn.role}: name one that writes it in "
                f"data.chat_template"
            )
    unread = [f"key {key!r} of chat_template_kwargs" for key in values.options if not keys.is_variable(key)]
    left_out = {turn.role for turn in turns if not is_assistant(turn) and not _is_in(text, turn.content.strip())}
    if any(not _is_in(text, turn.given.get(_THOUGHT, "").strip()) for turn in turns):
        unread.append("thought of an earlier turn")
    return (*keys.unread(text, turns), *unread, *(f"text of a turn of the {role}" for role in sorted(left_out)))


def check_thoughts(text: str, turns: Sequence[Message]) -> None:
    """Raise UserError for a turn that is trained on whose thought is not in ``text``."""
    for turn in turns:
        thought = turn.given.get(_THOUGHT, "")
        if turn.is_response and not _is_in(text, thought.strip()):
            raise UserError(
                "the chat template leaves out the thought of a turn that is trained on: make it a part of the content, "
                "or name a template that keeps thoughts in data.chat_template"
            )


def _check_calls(text: str, turn: Message) -> None:
    for call in turn.given[_CALLED]:
        words = [call["function"]["name"], *texts_of(call["function"]["arguments"])]
        missing = next((word for word in words if not _is_in(text, word)), None)
        if missing is not None:
            raise UserError(
                f"the chat template does not write calls of tools ({missing!r} of {words[0]!r} is left out): name one "
                f"that does in data.chat_template, or give them as text"
            )
    if not _is_in(text, turn.content.strip()):
        raise UserError(
            "the chat template leaves out the text next to a call of a tool: name one that writes both in "
            "data.chat_template, or remove the text"
        )


def _is_in(text: str, part: str) -> bool:
    """Whether a rendered text has ``part``, as it is or as JSON writes it."""
    return part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (False, True))


def _called(call: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "question"}, {"role": "assistant", "content": "", _CALLED: [call]}]


def _as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
