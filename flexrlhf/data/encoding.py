"""Token ids of rows: prompts, responses, and which tokens of a response are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from flexrlhf.data.chat import ChatFormat, ChatTemplate, encode_with_cuts
from flexrlhf.data.chat_ends import EOS
from flexrlhf.data.chat_responses import RenderedResponse, ResponseSpan, render_response
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

    def segments(self, prompt: Sequence[int], decode: Callable[..., str]) -> Iterator[tuple[bool, str]]:
        """Yield the parts that are trained on, or not, as text.

        Each is decoded after all before it: alone, some tokenizers drop a leading space.
        """
        mask, start, before = self.is_trained, 0, decode(list(prompt))
        for end in range(1, len(mask) + 1):
            if end == len(mask) or mask[end] != mask[start]:
                whole = decode([*prompt, *self.ids[:end]])
                follows = whole.startswith(before)
                yield mask[start], whole[len(before) :] if follows else decode(list(self.ids[start:end]))
                start, before = end, whole


@dataclass(frozen=True)
class EncodedRow:
    """A row as token ids.

    text:     the prompt as text, as a template renders it
    turns:    the prompt as a chat, where it is one
    control:  a control token in the row's own text that is encoded as a token; empty without one
    escaped:  one that is encoded as text
    unread:   names of columns, keys and turns that are in no text of the row
    unknown:  number of tokens that stand for what the tokenizer does not know
    remarks:  what a user should know of the row, the ends of sentences about rows
    """

    text: str
    prompt: tuple[int, ...]
    responses: tuple[EncodedResponse, ...]
    turns: Chat = ()
    control: str = ""
    escaped: str = ""
    unread: tuple[str, ...] = ()
    unknown: int = 0
    remarks: tuple[str, ...] = ()


class RowEncoder:
    """Encoding of rows by one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, max_response_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._limit = max_response_tokens
        self._bos = bos_in_front(tokenizer)
        self._unknown = unknown_token(tokenizer)
        self._controls = ControlTokens(tokenizer)

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
        is_chat = bool(row.turns or row.completions)
        end = self._turn_end(row.is_made) if is_chat else ""
        row = self._controls.without_doubled(row, bool(self._bos) or not (row.prompt or is_chat), end)
        used = self._controls.mark_row(row, self._chat.control)
        control = self._controls.found(self._controls.mark_row(used, "text"))
        if control and self._chat.control == "refuse":
            raise UserError(
                f"the text has {control!r}, a control token of the tokenizer, which data.control_tokens refuses; "
                f"remove it, or encode it as text by data.control_tokens=text"
            )
        encoded = self._encode_chat(used) if is_chat else self._encode_text(used)
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

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._chat.template, self._chat.tools, self._chat.end)

    def _turn_end(self, is_made: bool) -> str:
        """Return the template's end of a turn. Raises UserError without a template.

        is_made:  whether a system prompt makes a chat of the row
        """
        try:
            return self._chat_template.turn_end
        except UserError as error:
            advice = "; a system prompt makes a chat of a text, unless data.template joins both" * is_made
            raise UserError(f"{error}{advice}") from None

    def _encode_chat(self, row: TextExample) -> EncodedRow:
        template = self._chat_template.of_row(row.values)
        if not row.completions:
            text = template.prompt(row.turns)
            unread = check_written(text, row.turns, row.values, template.keys)
            return EncodedRow(self._controls.unmark(text), tuple(self._controls.encode(text)), (), unread=unread)
        rendered, unread = [], tuple[str, ...]()
        for completion in row.completions:
            found = render_response(template, row.turns, completion)
            unread += check_written(found.text, (*row.turns, *completion), row.values, template.keys)
            check_thoughts(found.text[found.prompt :], completion)
            rendered.append(replace(found, spans=_of_trained(found.spans, completion)))
        prompts, responses = zip(*map(self._encode_rendered, rendered), strict=True)
        remarks = [remark for each in rendered for remark in each.remarks]
        remarks += [self._no_end for each in responses if each.is_finished and not self._is_ended(each)]
        text = self._controls.unmark(rendered[0].text[: rendered[0].prompt])
        return EncodedRow(text, prompts[0], responses, unread=unread, remarks=tuple(dict.fromkeys(remarks)))

    def _encode_rendered(self, rendered: RenderedResponse) -> tuple[tuple[int, ...], EncodedResponse]:
        """Return prompt and response, of which the spans are trained on."""
        cuts = [rendered.prompt, *(place for span in rendered.spans for place in span)]
        ids, (start, *bounds) = encode_with_cuts(rendered.text, cuts, self._controls.encode)
        is_trained = [False] * len(ids)
        for first, last in zip(bounds[::2], bounds[1::2], strict=True):
            is_trained[first:last] = [True] * (last - first)
        return tuple(ids[:start]), self._cut(ids[start:], is_trained[start:])

    def _is_ended(self, response: EncodedResponse) -> bool:
        """Whether a token that ends a response is among the last ones that are trained on without a gap."""
        last = max((place for place, each in enumerate(response.is_trained, start=1) if each), default=0)
        first = next((index for index in range(last, 0, -1) if not response.is_trained[index - 1]), 0)
        return not set(self._ends).isdisjoint(response.ids[first:last])

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return self._chat.ends or (*(() if eos is None else (eos,)), *self._chat_template.end_tokens())

    @cached_property
    def _no_end(self) -> str:
        """Remark on a response that trains no token that ends one, with the token that would follow it."""
        texts = [self._controls.texts[each] for each in self._ends if each in self._controls.texts]
        following = self._chat_template.next_turn()
        named = next((text for text in texts if following.startswith(text)), EOS)
        return (
            f"train on no token that ends a response ({', '.join(texts)}), so a policy would not learn to stop: "
            f"data.end_token={named} has the chat template write one behind each turn of the assistant"
        )


def _of_trained(spans: tuple[ResponseSpan, ...], completion: Chat) -> tuple[ResponseSpan, ...]:
    """Return the spans of the turns that are trained on, of one span for each turn of the assistant."""
    turns = [turn for turn in completion if is_assistant(turn)]
    if all(turn.is_trained for turn in turns):
        return spans
    if len(spans) != len(turns):
        raise UserError(
            f"some turns are marked as not trained on, but the chat template marks {len(spans)} texts of {len(turns)} "
            f"turns of the assistant with {{% generation %}}, so theirs cannot be found"
        )
    return tuple(span for span, turn in zip(spans, turns, strict=True) if turn.is_trained)


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token of texts that the tokenizer does not know; None if it knows all."""
    token: int | None = getattr(tokenizer, "unk_token_id", None)
    is_written = token is not None and token in tokenizer.encode(_UNKNOWN, add_special_tokens=False)
    return token if is_written else None


def bos_in_front(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer writes before a text: bos or none, whether or not it has such a token."""
    bos = tokenizer.bos_token_id
    return () if bos is None or tokenizer.encode("", add_special_tokens=True)[:1] != [bos] else (bos,)
