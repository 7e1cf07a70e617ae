"""Control tokens in the texts of rows: found, and encoded as plain text if only a template may write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from flexrlhf.config.data_settings import ControlUse
from flexrlhf.data.known_keys import RowValues, texts_of, with_texts
from flexrlhf.data.messages import Chat, Message, is_assistant
from flexrlhf.data.text_example import TextExample

_ESCAPE = "\U000f0000"
"""Character of private use in front of one that stands for a control token as text, or for this character."""
_MARKED = re.compile(f"{_ESCAPE}(.)", re.DOTALL)
Change = Callable[[str], str]


class ControlTokens:
    """Special tokens of a tokenizer, as texts contain them.

    A text is marked before a template renders it: its own control tokens then differ from those of the template.

    texts:  of all, by their ids
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {number: text for number, token in added.items() if token.special and (text := str(token)).strip()}
        self.texts: Mapping[int, str] = special
        self._tokens = tokens = sorted(special.values(), key=len, reverse=True)
        self._encode = tokenizer.encode
        self._bos, self._eos = (special.get(each, "") for each in (tokenizer.bos_token_id, tokenizer.eos_token_id))
        self._texts = {chr(ord(_ESCAPE) + number): text for number, text in enumerate([_ESCAPE, *tokens])}
        self._marks = {text: _ESCAPE + mark for mark, text in self._texts.items()}
        self._own = re.compile("|".join(map(re.escape, self._marks)))
        self._template = re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")

    def mark(self, text: str) -> str:
        """Return a text with its control tokens marked as text."""
        return self._own.sub(lambda found: self._marks[found.group()], text)

    def unmark(self, text: str) -> str:
        """Return a marked text as it was."""
        return _MARKED.sub(lambda found: self._texts[found.group(1)], text)

    def mark_row(self, row: TextExample, use: ControlUse) -> TextExample:
        """Return a row with the control tokens of its own text marked that are text under ``use``.

        Never marked are bos in front of a prompt and a token behind a response, which texts may have themselves.
        """
        if use == "text":
            return _changed(row, self._mark_prompt, self.mark, self._mark_response, self.mark)
        is_chat = bool(row.turns or row.completions)
        return _changed(row, _escaped, self.mark if use == "auto" and is_chat else _escaped, _escaped, _escaped)

    def without_doubled(self, row: TextExample, writes_bos: bool, turn_end: str = "") -> TextExample:
        """Return a row without the tokens at the ends of its texts that are written around them.

        These are bos in front of a response, of a prompt all but one, and behind a response the white space that
        follows its end token, or the token by which a template begins ``turn_end``.

        writes_bos:  whether bos is in front of a prompt
        """
        end = next((token for token in self._tokens if turn_end.startswith(token)), "")

        def response(text: str) -> str:
            text = _without_front(text, self._bos) if writes_bos else text
            return _without_back(text, end) if end else self._with_one_eos(text)

        def prompt(text: str) -> str:
            rest = _without_front(text, self._bos) if writes_bos else text
            return self._bos + rest if len(rest) < len(text) else text

        return _changed(row, prompt, _same, response, _same)

    def _with_one_eos(self, text: str) -> str:
        rest = _without_back(text, self._eos)
        return rest + self._eos if len(rest) < len(text) else text

    def found(self, marked: TextExample) -> str:
        """Return a marked control token of a row; nothing without one."""
        turns = [turn for chat in (marked.turns, *marked.completions) for turn in chat]
        given = [*(turn.given for turn in turns if turn.given), *marked.values.tools, marked.values.options]
        texts = [marked.prompt, *marked.responses, *(turn.content for turn in turns), *texts_of(given)]
        marks = (mark for text in texts for mark in _MARKED.findall(text))
        return next((self._texts[mark] for mark in marks if mark != _ESCAPE), "")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text: a marked control token is text, another one is itself.

        add_special_tokens:  also those that the tokenizer adds to a text; then a text with a mark has no token but them
        """
        ids: list[int] = []
        pieces = self._template.split(text) if _ESCAPE in text and not add_special_tokens else [text]
        for is_marked, group in groupby(pieces, lambda piece: _ESCAPE in piece):
            options = {"split_special_tokens": True} if is_marked else {}
            ids += self._encode(self.unmark("".join(group)), add_special_tokens=add_special_tokens, **options)
        return ids

    def _mark_prompt(self, text: str) -> str:
        rest = text.removeprefix(self._bos)
        return text[: len(text) - len(rest)] + self.mark(rest)

    def _mark_response(self, text: str) -> str:
        end = next((token for token in self._tokens if text.endswith(token)), "")
        return self.mark(text.removesuffix(end)) + end


def _same(text: str) -> str:
    return text


def _without_front(text: str, token: str) -> str:
    """Return a text without a token, once or several times, at its beginning."""
    while token and text.lstrip().startswith(token):
        text = text.lstrip().removeprefix(token)
    return text


def _without_back(text: str, token: str) -> str:
    """Return a text without a token, once or several times, at its end."""
    while token and text.rstrip().endswith(token):
        text = text.rstrip().removesuffix(token)
    return text


def _escaped(text: str) -> str:
    return text.replace(_ESCAPE, _ESCAPE * 2)


def _changed(row: TextExample, prompt: Change, turn: Change, response: Change, key: Change) -> TextExample:
    """Return a row with changed texts: ``response`` changes the assistant's turns, too, ``key`` their further keys, and
    ``turn`` all others."""

    def message(each: Message) -> Message:
        content, given = (response, key) if is_assistant(each) else (turn, turn)
        return replace(each, content=content(each.content), given=with_texts(each.given, given))

    def chat(turns: Chat) -> Chat:
        return tuple(map(message, turns))

    tools, options = (with_texts(values, turn) for values in (row.values.tools, row.values.options))
    return replace(
        row,
        prompt=prompt(row.prompt),
        responses=tuple(map(response, row.responses)),
        turns=chat(row.turns),
        completions=tuple(map(chat, row.completions)),
        values=RowValues(tuple(tools), options),
    )
