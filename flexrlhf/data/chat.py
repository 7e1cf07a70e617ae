"""Chats as text, rendered by a chat template: a Jinja text that a tokenizer brings, which transformers renders in a
sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os.path import commonprefix
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from flexrlhf.config.data_settings import ControlUse
from flexrlhf.data.chat_bounds import bounded_memory, checked_length, one_sentence
from flexrlhf.data.chat_ends import end_token, with_end_of_each, with_end_of_last
from flexrlhf.data.known_keys import RowValues
from flexrlhf.data.messages import Message, is_assistant
from flexrlhf.data.template_values import TemplateKeys
from flexrlhf.errors import UserError

ChatUse = Literal["auto", "always", "never"]
"""Rows that a chat template renders: those that are chats, all, or none."""
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REPLY, _NEXT = "reply-4f1d", "next-4f1d"
_PROBE = (Message("user", "question"), Message("assistant", _REPLY))
_THOUGHTS = "<think>\nthought\n</think>\n\n"
"""Text in front of a reply that some templates drop from earlier turns."""
Tool = Mapping[str, Any]
"""JSON schema of a function that the policy may call, as transformers writes it."""


@dataclass(frozen=True)
class ChatFormat:
    """Settings by which rows become chats, and chats text.

    use:       rows that the template renders
    template:  its text; None: the tokenizer's own
    control:   use of control tokens of the tokenizer in a row's own text
    tools:     functions that the policy may call, which the template writes into prompts
    end:       token that the template is to write behind the assistant's turns; None: as it is
    ends:      ids of all tokens that end a response; none: the tokenizer's eos and that of the template
    """

    use: ChatUse = "auto"
    template: str | None = None
    control: ControlUse = "auto"
    tools: tuple[Tool, ...] = ()
    end: str | None = None
    ends: tuple[int, ...] = ()

    @classmethod
    def read(cls, use: ChatUse, file: str | None) -> ChatFormat:
        """Return how chats become text, with the template in ``file``. Raises UserError for a file that is none."""
        if file is None:
            return cls(use)
        try:
            return cls(use, Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template {file}: cannot be read ({error})") from None


DEFAULT_CHAT = ChatFormat()


class ChatTemplate:
    """A chat template with the tokenizer whose special tokens it writes.

    Raises UserError if the tokenizer has none and no other is given, if it does not write ``tools``, or if ``end`` is
    no token.

    end:  token that it writes behind the assistant's turns; empty if that was not set
    """

    def __init__(
        self, tokenizer: Any, template: str | None = None, tools: Sequence[Tool] = (), end: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        found = self.own(tokenizer, bool(tools)) if template is None else template
        if found is None:
            raise UserError(
                "the row is a chat, but the tokenizer has no chat template: name a file with one in "
                "data.chat_template, or another data.tokenizer"
            )
        self.text: str = found
        self._options: Mapping[str, Any] = {}
        self.keys = TemplateKeys(self.text, self._render_plain)
        self.end, self._end_of_last = "", ""
        if end is not None:
            self._write_end(end_token(tokenizer, end))
        if tools:
            self._check_tools()

    @staticmethod
    def own(tokenizer: Any, with_tools: bool = False) -> str | None:
        """Return the template of a tokenizer, of several the one ``with_tools`` or the default; None if it has none."""
        template: str | dict[str, str] | None = getattr(tokenizer, "chat_template", None)
        if not isinstance(template, dict):
            return template
        return template.get("tool_use" if with_tools else "default", template.get("default"))

    @classmethod
    def of(cls, tokenizer: Any, chat: ChatFormat, tools: Sequence[Tool] = ()) -> ChatTemplate | None:
        """Return the template of ``chat``, else the tokenizer's own; None if there is neither."""
        if chat.template is None and cls.own(tokenizer, bool(tools)) is None:
            return None
        return cls(tokenizer, chat.template, tools, chat.end)

    def of_row(self, values: RowValues) -> ChatTemplate:
        """Return this template with what a row gives to it. Raises UserError for tools next to those of a run."""
        if not values:
            return self
        if values.tools and self._tools:
            raise UserError("the row has tools, and environment.tools are others: remove one of them")
        found = copy(self)
        found._tools, found._options = [dict(tool) for tool in values.tools] or self._tools, values.options
        for name in ("turn_end", "prompt_end"):  # they may depend on the row
            vars(found).pop(name, None)
        return found

    @property
    def is_marked(self) -> bool:
        """Whether the template marks the assistant's text."""
        return _MARKER.search(self.text) is not None

    @cached_property
    def special_tokens(self) -> re.Pattern[str]:
        """Pattern of the tokens that the tokenizer never splits."""
        tokens = sorted(map(str, self._tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    def prompt(self, turns: Sequence[Message], is_bounded: bool = True) -> str:
        """Return the text of a prompt, up to where the assistant begins, or goes on where the last turn is its own.

        ``is_bounded``: as in ``chat``.
        """
        check_turns(turns)
        is_continued = is_assistant(turns[-1])
        return self.render(turns, generation=not is_continued, continued=is_continued, is_bounded=is_bounded)

    def chat(self, turns: Sequence[Message]) -> str:
        """Return a whole chat as text, during training: without a bound of memory, which other threads would feel."""
        return self.render(turns, is_bounded=False)

    @cached_property
    def turn_end(self) -> str:
        """Text that the template writes behind an assistant's turn; nothing if it cannot be found."""
        try:
            text = self.render(_PROBE)
        except UserError:
            return ""
        _, found, end = text.rpartition(_PROBE[-1].content)
        return end if found else ""

    @cached_property
    def prompt_end(self) -> str:
        """End of a prompt for sampling that is not in front of a response without a thought."""
        prompt, text = self.render(_PROBE[:1], generation=True), self.render(_PROBE)
        return prompt[len(commonprefix((prompt, text))) :]

    def end_tokens(self) -> tuple[int, ...]:
        """Return the id of the token that begins the end of an assistant's turn, if it is a special one."""
        text = self.turn_end.lstrip()
        first = self._tokenizer.encode(text, add_special_tokens=False)[:1] if text else []
        return tuple(token for token in first if token in self._tokenizer.added_tokens_decoder)

    def after_turn(self, messages: Sequence[Message]) -> str:
        """Return the text behind an assistant's turn: its end, ``messages``, and the beginning of its next turn.

        It is rendered behind a short chat, during training: without a bound of memory.
        """
        text = self.render((*_PROBE, *messages), generation=True, is_bounded=False)
        _, found, after = text.partition(_REPLY)
        if not found:
            raise UserError("the chat template leaves out the assistant's turn once others follow")
        return after

    def next_turn(self) -> str:
        """Return the text behind an assistant's turn that one of the user follows; nothing if that is refused."""
        try:
            return self.after_turn([Message("user", _NEXT)])
        except UserError:
            return ""

    def check_reply(self, role: str, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Raise UserError if a turn of ``role`` behind the assistant's is left out. ``given``: its further keys."""
        if _NEXT not in self.after_turn([Message(role, _NEXT, given)]):
            raise UserError(
                f"the chat template leaves out a turn of the {role} behind one of the assistant's that is a text: name "
                "another one in data.chat_template"
            )

    def check_turns_stay(self, role: str, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Raise UserError if an assistant's turn is rendered in another way once a turn of ``role`` follows, with
        further keys ``given``."""
        for content in (_REPLY, _THOUGHTS + _REPLY):
            turns = (_PROBE[0], Message("assistant", content))
            begun, ended = self.render(turns[:1], generation=True), self.render(turns)
            going_on = self.render((*turns, Message(role, _NEXT, given)), generation=True)
            # the next turn of another role may begin with another end
            stays = going_on.startswith(ended.removesuffix(self._end_of_last))
            if not (content in ended and ended.startswith(begun) and stays):
                thoughts = " and its thoughts" * (content is not _REPLY)
                raise UserError(
                    f"the chat template renders a turn of the assistant{thoughts} in another way once a turn of the "
                    f"{role} follows, so the tokens of an episode would not be the template's: set "
                    "environment.bridge=true, or name a template that keeps turns as they are in data.chat_template"
                )

    def _write_end(self, end: str) -> None:
        """Change the template such that ``end`` is behind each turn of the assistant, if it is not.

        Where the next turn of the user begins with it, it is behind the last turn alone.
        """
        self.end = end
        if self.turn_end.lstrip().startswith(end):
            return
        del self.turn_end  # it changes
        front, found, _ = self.next_turn().partition(end)
        if found and not front.strip():
            self._end_of_last = front + end
            self.text = with_end_of_last(self.text, self._end_of_last)
        else:
            self.text = with_end_of_each(self.text, end)

    def _check_tools(self) -> None:
        """Raise UserError if a prompt does not have the tools."""
        text = self.render(_PROBE[:1], generation=True)
        for tool in self._tools or ():
            name = tool["function"]["name"]
            if name not in text:
                raise UserError(
                    f"the chat template does not write tools into a prompt, such as {name!r} of environment.tools: "
                    "name one that does in data.chat_template"
                )

    def marked(self, turns: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return ``turns`` as text, and the ranges of characters that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation = self._as_read(self.keys.messages(turns), is_bounded=True)
        with one_sentence(), bounded_memory():
            (text,), (spans,) = render_jinja_template(
                conversations=[conversation],
                tools=self._tools,
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._options},
            )
        return checked_length(text), spans

    def _as_read(self, messages: list[dict[str, Any]], is_bounded: bool) -> list[dict[str, Any]]:
        return list(map(_in_parts, messages)) if _takes_parts(self.text, is_bounded) else messages

    def render(
        self, turns: Sequence[Message], generation: bool = False, continued: bool = False, is_bounded: bool = True
    ) -> str:
        """Return ``turns`` as text, with the beginning of the assistant's next turn for ``generation``, or without the
        end of the last one where it is ``continued``. ``is_bounded``: as in ``chat``."""
        return self._render_plain(self.keys.messages(turns), generation, continued, is_bounded)

    def _render_plain(
        self,
        messages: list[dict[str, Any]],
        generation: bool = False,
        continued: bool = False,
        is_bounded: bool = True,
    ) -> str:
        conversation = self._as_read(messages, is_bounded)
        with one_sentence(), bounded_memory() if is_bounded else nullcontext():
            text: str = self._tokenizer.apply_chat_template(
                conversation,
                tools=self._tools,
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=generation,
                continue_final_message=continued,
                **self._options,
            )
        return checked_length(text)


def encode_with_cuts(
    text: str, cuts: Sequence[int], encode: Callable[[str], Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Return the token ids of ``text``, and how many of them are before each of ``cuts``, which ascend.

    The ids are those of the whole text. Where a token would reach over a cut, the text behind it is encoded anew, so
    that the text before a cut always has the ids that it has alone.
    """
    ids: list[int] = []
    counts: list[int] = []
    start, rest = 0, list(encode(text))
    for cut in cuts:
        head = list(encode(text[start:cut]))
        if rest[: len(head)] != head:
            ids, start, rest, head = ids + head, cut, list(encode(text[cut:])), []
        counts.append(len(ids) + len(head))
    return ids + rest, counts


@lru_cache(maxsize=16)
def _takes_parts(template: str, is_bounded: bool) -> bool:
    """Whether a template leaves out contents that are texts and writes lists of parts, as of models that see images."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def is_written(messages: list[dict[str, Any]]) -> bool:
        try:
            with one_sentence(), bounded_memory() if is_bounded else nullcontext():
                (text,), _ = render_jinja_template(conversations=[messages], chat_template=template)
        except UserError:
            return False
        return _REPLY in text and "'type'" not in text

    plain = _plain(_PROBE)
    return "text" in template and not is_written(plain) and is_written(list(map(_in_parts, plain)))


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message["content"], str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def check_turns(turns: Sequence[Message]) -> None:
    """Raise UserError for a chat without a turn before the response."""
    if not turns:
        raise UserError("the chat has no turn before the response")


def _plain(turns: Sequence[Message]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in turns]
