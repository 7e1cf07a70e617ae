"""Chats as text, rendered by a chat template, and the parts of it that the assistant has written.

A template is a Jinja text that a tokenizer brings; transformers renders it in a sandbox. Which part of a chat is the
assistant's follows from ``{% generation %}`` markers in the template, else from the prefix rule: the turns before an
assistant's turn, with the prompt for generation, render to the beginning of the whole chat, and so do the turns up to
its end.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flexrlhf.config.data_settings import ControlUse
from flexrlhf.data.known_keys import RowValues
from flexrlhf.data.messages import Message, is_assistant
from flexrlhf.data.template_values import TemplateKeys
from flexrlhf.errors import UserError
from flexrlhf.text import bytes_text

ChatUse = Literal["auto", "always", "never"]
"""Rows that a chat template renders: those that are chats, all, or none."""
MOST_BYTES = 2**30
"""Most memory in which a template renders a chat: it comes with a model, and may write without end."""
MOST_CHARACTERS = 2**24
"""Longest chat as text, more than any model reads: a tokenizer takes a hundred times its bytes."""
_STATM = Path("/proc/self/statm")
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
    """

    use: ChatUse = "auto"
    template: str | None = None
    control: ControlUse = "auto"
    tools: tuple[Tool, ...] = ()


DEFAULT_CHAT = ChatFormat()


class ChatTemplate:
    """A chat template with the tokenizer whose special tokens it writes.

    Raises UserError if the tokenizer has none and no other is given, or if it does not write ``tools``.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, tools: Sequence[Tool] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._template = own_template(tokenizer, bool(tools)) if template is None else template
        if self._template is None:
            raise UserError(
                "the row is a chat, but the tokenizer has no chat template: name a file with one in "
                "data.chat_template, or another data.tokenizer"
            )
        self._options: Mapping[str, Any] = {}
        self.keys = TemplateKeys(self._template, self._render_plain)
        if tools:
            self._check_tools()

    def of_row(self, values: RowValues) -> ChatTemplate:
        """Return this template with what a row gives to it. Raises UserError for tools next to those of a run."""
        if not values:
            return self
        if values.tools and self._tools:
            raise UserError("the row has tools, and environment.tools are others: remove one of them")
        found = copy(self)
        found._tools, found._options = [dict(tool) for tool in values.tools] or self._tools, values.options
        return found

    def prompt(self, turns: Sequence[Message], is_bounded: bool = True) -> str:
        """Return the text of a prompt, up to where the assistant begins, or goes on where the last turn is its own.

        ``is_bounded``: as in ``chat``.
        """
        _check_turns(turns)
        is_continued = is_assistant(turns[-1])
        return self._render(turns, generation=not is_continued, continued=is_continued, is_bounded=is_bounded)

    def response(
        self, turns: Sequence[Message], completion: Sequence[Message]
    ) -> tuple[str, int, tuple[tuple[int, int], ...]]:
        """Return ``turns`` and ``completion`` as one text; the characters of ``turns``; and the ranges of characters
        behind them that the assistant has written, in order."""
        _check_turns(turns)
        if not any(map(is_assistant, completion)):
            raise UserError("the response has no assistant turn")
        marked = self._marked((*turns, *completion)) if _MARKER.search(str(self._template)) else None
        text, found = marked or (self._render((*turns, *completion)), ())
        prompt = self._length_of_prefix(text, turns, generation=is_assistant(completion[0]))
        spans = tuple((max(first, prompt), last) for first, last in found if last > prompt)
        if marked is None:
            spans = tuple(self._prefix_spans(text, turns, completion))
        if not spans:
            raise UserError("the chat template marks no text of the response with {% generation %}")
        return text, prompt, spans

    def chat(self, turns: Sequence[Message]) -> str:
        """Return a whole chat as text, during training: without a bound of memory, which other threads would feel."""
        return self._render(turns, is_bounded=False)

    def turn_end(self) -> str:
        """Return the text that the template writes behind an assistant's turn; nothing if it cannot be found."""
        try:
            text = self._render(_PROBE)
        except UserError:
            return ""
        _, found, end = text.rpartition(_PROBE[-1].content)
        return end if found else ""

    def after_turn(self, messages: Sequence[Message]) -> str:
        """Return the text behind an assistant's turn: its end, ``messages``, and the beginning of its next turn.

        It is rendered behind a short chat, during training: without a bound of memory.
        """
        text = self._render((*_PROBE, *messages), generation=True, is_bounded=False)
        _, found, after = text.partition(_REPLY)
        if not found:
            raise UserError("the chat template leaves out the assistant's turn once others follow")
        return after

    def check_reply(self, role: str) -> None:
        """Raise UserError if a turn of ``role`` behind the assistant's is left out."""
        if _NEXT not in self.after_turn([Message(role, _NEXT)]):
            raise UserError(
                f"the chat template leaves out a turn of the {role} behind one of the assistant's that is a text: name "
                "another one in data.chat_template"
            )

    def check_turns_stay(self, role: str) -> None:
        """Raise UserError if an assistant's turn is rendered in another way once a turn of ``role`` follows."""
        for content in (_REPLY, _THOUGHTS + _REPLY):
            turns = (_PROBE[0], Message("assistant", content))
            begun, ended = self._render(turns[:1], generation=True), self._render(turns)
            going_on = self._render((*turns, Message(role, _NEXT)), generation=True)
            if not (content in ended and ended.startswith(begun) and going_on.startswith(ended)):
                thoughts = " and its thoughts" * (content is not _REPLY)
                raise UserError(
                    f"the chat template renders a turn of the assistant{thoughts} in another way once a turn of the "
                    f"{role} follows, so the tokens of an episode would not be the template's: set "
                    "environment.bridge=true, or name a template that keeps turns as they are in data.chat_template"
                )

    def _check_tools(self) -> None:
        """Raise UserError if a prompt does not have the tools."""
        text = self._render(_PROBE[:1], generation=True)
        for tool in self._tools or ():
            name = tool["function"]["name"]
            if name not in text:
                raise UserError(
                    f"the chat template does not write tools into a prompt, such as {name!r} of environment.tools: "
                    "name one that does in data.chat_template"
                )

    def _marked(self, turns: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return ``turns`` as text, and the ranges of characters that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _one_sentence(), _bounded_memory():
            (text,), (spans,) = render_jinja_template(
                conversations=[self.keys.messages(turns)],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._options},
            )
        return _checked_length(text), spans

    def _prefix_spans(
        self, text: str, turns: Sequence[Message], completion: Sequence[Message]
    ) -> Iterator[tuple[int, int]]:
        messages = (*turns, *completion)
        for number in range(len(turns), len(messages)):
            if is_assistant(messages[number]):
                start = self._length_of_prefix(text, messages[:number], generation=True)
                yield start, self._length_of_prefix(text, messages[: number + 1], generation=False)

    def _length_of_prefix(self, text: str, turns: Sequence[Message], generation: bool) -> int:
        """Return the length of the first turns as text, which ``text`` must begin with."""
        prefix = self._render(turns, generation=generation)
        if not text.startswith(prefix):
            raise UserError(
                f"the chat template renders the first {len(turns)} turns in another way when others follow, so what "
                "the assistant has written cannot be found: mark it with {% generation %} in a template of your own "
                "(data.chat_template)"
            )
        return len(prefix)

    def _render(
        self, turns: Sequence[Message], generation: bool = False, continued: bool = False, is_bounded: bool = True
    ) -> str:
        messages = self.keys.messages(turns)
        return self._render_plain(messages, generation, continued, is_bounded)

    def _render_plain(
        self,
        messages: list[dict[str, Any]],
        generation: bool = False,
        continued: bool = False,
        is_bounded: bool = True,
    ) -> str:
        with _one_sentence(), _bounded_memory() if is_bounded else nullcontext():
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation,
                continue_final_message=continued,
                **self._options,
            )
        return _checked_length(text)


def read_chat_format(use: ChatUse, file: str | None) -> ChatFormat:
    """Return how chats become text, with the template in ``file``. Raises UserError for a file that is none."""
    if file is None:
        return ChatFormat(use)
    try:
        return ChatFormat(use, Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template {file}: cannot be read ({error})") from None


def own_template(tokenizer: Any, with_tools: bool = False) -> str | None:
    """Return the tokenizer's chat template, of several the one ``with_tools`` or the default; None if it has none."""
    template: str | dict[str, str] | None = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, dict):
        return template
    return template.get("tool_use" if with_tools else "default", template.get("default"))


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


def _check_turns(turns: Sequence[Message]) -> None:
    if not turns:
        raise UserError("the chat has no turn before the response")


def _checked_length(text: str) -> str:
    """Return a chat as text. Raises UserError if it is too long."""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"the chat template writes {len(text)} characters for one chat, more than {MOST_CHARACTERS}")
    return text


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Let this process take at most MOST_BYTES more in the body, which raises MemoryError beyond. On Linux alone."""
    if sys.platform != "linux":
        yield
        return
    used = int(_STATM.read_bytes().partition(b" ")[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn an error of a template, or in it, into a UserError."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is no Jinja: {error.message}, in its line {error.lineno}") from None
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the chat template refuses the turns: {reason:.300}") from None
    except MemoryError:
        raise UserError(f"the chat template takes more than {bytes_text(MOST_BYTES)} of memory for one chat") from None
