"""Token ids of rows: prompts, responses, and which tokens of a response are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flexrlhf.data.chat import ChatFormat, ChatTemplate, encode_with_cuts
from flexrlhf.data.control_tokens import ControlTokens
from flexrlhf.data.messages import Chat, is_assistant
from flexrlhf.data.template_values import check_thoughts, check_written
from flexrlhf.data.text_example import TextExample, as_chat
from flexrlhf.errors import UserError

_UNKNOWN = "\U0010fffd"
"""A character that no vocabulary has."""


class Tokenizer(Protocol):
    """Part of a Hugging Face tokenizer that data loading needs; for chats also its template."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class EncodedResponse:
    """A response as token ids.

    ids:         at most as many as responses may have
    is_finished: whether they are all of it
    is_trained:  for each token whether it is trained on
    length:      tokens of all of it
    num_unknown: unknown ones of them
    """

    ids: tuple[int, ...]
    is_finished: bool
    is_trained: tuple[bool, ...]
    length: int
    num_unknown: int = 0


@dataclass(frozen=True)
class EncodedRow:
    """A row as token ids.

    text:     the prompt as text, as a template renders it
    turns:    the prompt as a chat, where it is one
    control:  a control token in the row's own text that is encoded as a token; empty without one
    escaped:  one that is encoded as text
    unread:   names of columns, keys and turns that are in no text of the row
    unknown:  number of tokens that stand for what the tokenizer does not know
    """

    text: str
    prompt: tuple[int, ...]
    responses: tuple[EncodedResponse, ...]
    turns: Chat = ()
    control: str = ""
    escaped: str = ""
    unread: tuple[str, ...] = ()
    unknown: int = 0


class RowEncoder:
    """Encoding of rows by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, max_response_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._limit = max_response_tokens
        self._bos = bos_in_front(tokenizer)
        self._unknown = unknown_token(tokenizer)
        self._controls = ControlTokens(tokenizer)
        self._template: ChatTemplate | None = None

    def encode(self, text: TextExample) -> EncodedRow:
        """Return the token ids of a row. Raises UserError for a row that has none, or that no template renders."""
        if (text.turns or text.completions) and self._chat.use == "never":
            raise UserError("the row is a chat, which only a chat template makes a text of: set data.chat=auto")
        row = as_chat(text) if self._chat.use == "always" else text
        if row.values and not row.turns:
            raise UserError(
                "the row has tools or variables for a chat template, but is a text, which none renders: set "
                "data.chat=always, or remove them"
            )
        used = self._controls.mark_row(row, self._chat.control)
        control = self._controls.found(self._controls.mark_row(used, "text"))
        if control and self._chat.control == "refuse":
            raise UserError(
                f"the text has {control!r}, a control token of the tokenizer, which data.control_tokens refuses; "
                f"remove it, or encode it as text by data.control_tokens=text"
            )
        encoded = self._encode_chat(used) if used.turns or used.completions else self._encode_text(used)
        unknown = encoded.prompt.count(self._unknown) + sum(response.num_unknown for response in encoded.responses)
        return replace(
            encoded,
            turns=row.turns,
            control=control,
            escaped=self._controls.found(used),
            unread=tuple(dict.fromkeys((*row.unread, *encoded.unread))),
            unknown=unknown,
        )

    def _encode_text(self, row: TextExample) -> EncodedRow:
        prompt, responses = self._encode_prompt(row), tuple(map(self._encode_response, row.responses))
        return EncodedRow(self._controls.unmark(row.prompt), prompt, responses)

    def _encode_prompt(self, row: TextExample) -> tuple[int, ...]:
        """Return bos where the tokenizer writes one, and the text; a text may begin with bos itself."""
        ids = tuple(self._controls.encode(row.prompt))
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if set(ids) == {bos}:
            raise UserError("the prompt is empty: its text is the beginning of a sequence alone")
        if ids:
            return ids if ids[: len(self._bos)] == self._bos else (*self._bos, *ids)
        if bos is not None:
            return (bos,)  # a response needs a token before it
        if row.is_text and eos is not None:
            return (eos,)  # separates pretraining texts if there is no bos
        raise UserError("the prompt is empty, and the tokenizer has no bos token to stand for it")

    def _encode_response(self, response: str) -> EncodedResponse:
        """Return the text with eos behind it, which it may end with itself."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise UserError("the tokenizer has no eos token, so a response cannot end")
        ids = self._controls.encode(response)
        return self._cut(ids if ids[-1:] == [eos] else [*ids, eos], [True] * (len(ids) + 1))

    def _cut(self, ids: Sequence[int], is_trained: Sequence[bool]) -> EncodedResponse:
        unknown, length, ids = ids.count(self._unknown), len(ids), tuple(ids[: self._limit])
        return EncodedResponse(ids, length <= self._limit, tuple(is_trained[: len(ids)]), length, unknown)

    def _encode_chat(self, row: TextExample) -> EncodedRow:
        self._template = self._template or ChatTemplate(self._tokenizer, self._chat.template, self._chat.tools)
        template = self._template.of_row(row.values)
        if not row.completions:
            text = template.prompt(row.turns)
            unread = check_written(text, row.turns, row.values, template.keys)
            return EncodedRow(self._controls.unmark(text), tuple(self._controls.encode(text)), (), unread=unread)
        rendered, unread = [], tuple[str, ...]()
        for completion in row.completions:
            text, prompt, spans = template.response(row.turns, completion)
            unread += check_written(text, (*row.turns, *completion), row.values, template.keys)
            check_thoughts(text[prompt:], completion)
            rendered.append((text, prompt, _of_trained(spans, completion)))
        prompts, responses = zip(*(self._encode_rendered(*each) for each in rendered), strict=True)
        text, prompt, _ = rendered[0]
        return EncodedRow(self._controls.unmark(text[:prompt]), prompts[0], responses, unread=unread)

    def _encode_rendered(
        self, text: str, prompt: int, spans: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, ...], EncodedResponse]:
        """Return prompt and response, of which the spans are trained on."""
        cuts = [prompt, *(place for span in spans for place in span)]
        ids, (start, *bounds) = encode_with_cuts(text, cuts, self._controls.encode)
        is_trained = [False] * len(ids)
        for first, last in zip(bounds[::2], bounds[1::2], strict=True):
            is_trained[first:last] = [True] * (last - first)
        return tuple(ids[:start]), self._cut(ids[start:], is_trained[start:])


def _of_trained(spans: Sequence[tuple[int, int]], completion: Chat) -> Sequence[tuple[int, int]]:
    """Return the spans of the turns that are trained on, of one span for each turn of the assistant."""
    turns = [turn for turn in completion if is_assistant(turn)]
    if all(turn.is_trained for turn in turns):
        return spans
    if len(spans) != len(turns):
        raise UserError(
            f"some turns are marked as not trained on, but the chat template marks {len(spans)} texts of {len(turns)} "
            f"turns of the assistant with {{% generation %}}, so theirs cannot be found"
        )
    return [span for span, turn in zip(spans, turns, strict=True) if turn.is_trained]


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token of texts that the tokenizer does not know; None if it knows all."""
    token: int | None = getattr(tokenizer, "unk_token_id", None)
    is_written = token is not None and token in tokenizer.encode(_UNKNOWN, add_special_tokens=False)
    return token if is_written else None


def bos_in_front(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer writes before a text: bos or none, whether or not it has such a token."""
    bos = tokenizer.bos_token_id
    return () if bos is None or tokenizer.encode("", add_special_tokens=True)[:1] != [bos] else (bos,)
