"""Examples: the rows of a data file, as text and as token ids.

``files`` reads the rows, ``text_rows`` makes a prompt and responses of each, ``chat`` renders those that are chats,
``encoding`` makes token ids, ``order`` says which step takes which example.
Everything is a pure function of its arguments; whatever a user can mend raises ``UserError`` with the row's number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flexrlhf.config.data_settings import BadRows, LongPrompts
from flexrlhf.data.chat import DEFAULT_CHAT, ChatFormat
from flexrlhf.data.encoding import EncodedRow, RowEncoder, Tokenizer, bos_in_front
from flexrlhf.data.files import Row
from flexrlhf.data.forms import PLAIN
from flexrlhf.data.messages import Chat
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.data.text_example import TextExample
from flexrlhf.data.text_rows import TextRows, further_bad
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs

_VARIES = re.compile(r"\d+|'[^']*'")
"""Part of a sentence in which those of two rows may differ: a number, or a name."""


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a run, in tokens, and which rows are left out.

    max_prompt:    tokens of the longest prompt
    max_response:  tokens at which responses are truncated
    long_prompts:  whether longer prompts are refused, dropped or truncated
    bad_rows:      whether rows that cannot be read are refused or dropped
    """

    max_prompt: int
    max_response: int
    long_prompts: LongPrompts = "error"
    bad_rows: BadRows = "error"

    @property
    def drops(self) -> bool:
        """Whether rows with longer prompts are left out."""
        return not self.long_prompts.startswith("truncate")


@dataclass(frozen=True)
class DataCounts:
    """Rows of a file, before any is left out or truncated.

    form:       of the rows
    num_rows:   of the file; where it is large, only some of them are counted
    prompts:    tokens of the prompt of each counted row that can be read
    responses:  tokens of the responses of each of them, end tokens included
    limits:     of the run
    controls:   of each of them with control tokens in its text, one that is encoded as such, and one as text; or ""
    bad:        why the other counted rows cannot be read, by their numbers from 1
    unread:     names of columns, keys and turns that are not read → number of rows that have them
    unknown:    number of unknown tokens of each row that has some
    remarks:    ends of sentences about rows → number of rows that have them
    """

    form: str
    num_rows: int
    prompts: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    limits: TokenLimits
    controls: tuple[tuple[str, str], ...] = ()
    bad: Mapping[int, str] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[int, ...] = ()
    remarks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: TextRows, encoded: Mapping[int, EncodedRow], limits: TokenLimits) -> DataCounts:
        """Return the counts of the rows of a file, those that could be ``encoded`` by their numbers."""
        return cls(
            rows.form,
            rows.num_rows,
            tuple(len(row.prompt) for row in encoded.values()),
            tuple(tuple(response.length for response in row.responses) for row in encoded.values()),
            limits,
            tuple((row.control, row.escaped) for row in encoded.values() if row.control or row.escaped),
            dict(sorted(rows.bad.items())),
            dict(Counter(name for row in encoded.values() for name in row.unread)),
            tuple(row.unknown for row in encoded.values() if row.unknown),
            dict(Counter(remark for row in encoded.values() for remark in row.remarks)),
        )

    @property
    def reasons(self) -> dict[int, int]:
        """First row with each reason → the number of rows that have it, but for names and numbers in it; the
        most frequent first."""
        first = dict[str, int]()
        number = dict[int, int]()
        for row, reason in self.bad.items():
            known = first.setdefault(_VARIES.sub("", reason), row)
            number[known] = number.get(known, 0) + 1
        return dict(sorted(number.items(), key=lambda item: -item[1]))

    @property
    def further_bad(self) -> str:
        """End of a sentence about the first bad row: the number of bad rows, if there is more than one."""
        return further_bad(self.bad, self.num_rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and responses."""
        return sum(self.prompts) + sum(map(sum, self.responses))

    @property
    def kept_controls(self) -> tuple[str, ...]:
        """Control tokens of the rows that have one which is encoded as such."""
        return tuple(kept for kept, _ in self.controls if kept)

    @property
    def escaped_controls(self) -> tuple[str, ...]:
        """Control tokens of the rows that have one which is encoded as text."""
        return tuple(escaped for _, escaped in self.controls if escaped)

    @property
    def num_long(self) -> int:
        """Number of prompts over the limit."""
        return sum(length > self.limits.max_prompt for length in self.prompts)

    @property
    def kept_responses(self) -> tuple[int, ...]:
        """Tokens of the responses of the rows that are not left out."""
        limit = self.limits.max_prompt
        return tuple(
            length
            for prompt, responses in zip(self.prompts, self.responses, strict=True)
            if prompt <= limit or not self.limits.drops
            for length in responses
        )

    @property
    def num_cut(self) -> int:
        """Number of responses that are truncated, and so have no end token."""
        return sum(length > self.limits.max_response for length in self.kept_responses)


@dataclass(frozen=True)
class Example:
    """A row as token ids.

    prompt:     token ids, never empty; bos is among them where the tokenizer or the chat template writes it
    responses:  none (prompts), one (demonstrations) or two (chosen, rejected)
    finished:   for each response whether it is whole; False if it was truncated at ``max_response_tokens``
    text:       the prompt as text, with ``with_columns`` only
    columns:    all columns of the row, with ``with_columns`` only
    turns:      the prompt as a chat, where it is one, with ``with_columns`` only
    trained:    for each response which of its tokens are trained on; (): all, as of responses of one turn
    """

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]
    text: str = field(default="", compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    turns: Chat = field(default=(), compare=False)
    trained: tuple[tuple[bool, ...], ...] = ()

    @staticmethod
    def to_data(examples: Iterable[Example]) -> list[Any]:
        """Return examples as data that JSON has."""
        found: list[Any] = _EXAMPLES.dump_python([*examples], mode="json")
        return found

    @staticmethod
    def from_data(data: object) -> list[Example]:
        """Return the examples of ``to_data``."""
        return _EXAMPLES.validate_python(data)

    def is_trained(self, response: int) -> tuple[bool, ...]:
        """Return for each token of a response whether it is trained on."""
        return self.trained[response] if self.trained else (True,) * len(self.responses[response])


_EXAMPLES = TypeAdapter(list[Example])


@dataclass(frozen=True)
class LoadedExamples:
    """Rows of a data file that a run uses. ``counts``: lengths of all rows, before some were left out or truncated."""

    examples: list[Example]
    counts: DataCounts

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        form: str = "auto",
        needs: Needs,
        tokenizer: Tokenizer,
        max_prompt_tokens: int,
        max_response_tokens: int,
        long_prompts: LongPrompts = "error",
        bad_rows: BadRows = "error",
        with_columns: bool = False,
        layout: RowLayout = PLAIN,
        chat: ChatFormat = DEFAULT_CHAT,
        rows: list[Row] | None = None,
    ) -> LoadedExamples:
        """Read and tokenise a data file, in file order, or ``rows`` that a program has made, which ``path`` names.

        ``form="auto"`` takes the form of the first row for all rows. ``needs``: how many responses to keep: none, the
        first, or two. Responses are truncated at ``max_response_tokens`` (eos counts). A prompt of more than
        ``max_prompt_tokens`` (bos counts) raises UserError, is left out or truncated, as ``long_prompts`` says; so is,
        by ``bad_rows``, a row that cannot be read. ``chat``: which rows a chat template renders.
        """
        path, limits = str(path), TokenLimits(max_prompt_tokens, max_response_tokens, long_prompts, bad_rows)
        texts = TextRows.read(path, form, needs, layout, drops=bad_rows == "drop", rows=rows)
        texts.check(path, bad_rows)
        encoded = encode_rows(texts, RowEncoder(tokenizer, chat, max_response_tokens), stops=bad_rows == "error")
        texts.check(path, bad_rows)
        examples = [_example(row, texts.texts[number] if with_columns else None) for number, row in encoded.items()]
        counts = DataCounts.of(texts, encoded, limits)
        if limits.drops:
            return cls(_within_limit(examples, list(encoded), path, limits), counts)
        is_left, bos = long_prompts == "truncate-left", next(iter(bos_in_front(tokenizer)), None)
        shorter = [truncated(example.prompt, max_prompt_tokens, is_left, bos) for example in examples]
        return cls([replace(each, prompt=ids) for each, ids in zip(examples, shorter, strict=True)], counts)


def encode_rows(rows: TextRows, encoder: RowEncoder, stops: bool = False) -> dict[int, EncodedRow]:
    """Return the token ids of rows by their numbers; those that have none are bad ones from then on.

    stops:  whether to end at the first of them
    """
    encoded = {}
    for number, text in rows.texts.items():
        try:
            encoded[number] = encoder.encode(text)
        except UserError as error:
            rows.bad[number] = str(error)
            if stops:
                break
    return encoded


def truncated(prompt: tuple[int, ...], limit: int, is_left: bool, bos: int | None) -> tuple[int, ...]:
    """Return at most ``limit`` tokens of a prompt, without its first or its last ones; bos in front stays."""
    if len(prompt) <= limit:
        return prompt
    front = 1 if is_left and prompt[0] == bos else 0
    return prompt[:front] + prompt[len(prompt) - limit + front :] if is_left else prompt[:limit]


def _example(row: EncodedRow, text: TextExample | None) -> Example:
    """Return a row's example, with the columns of its text if it is given."""
    trained = tuple(response.is_trained for response in row.responses)
    example = Example(
        row.prompt,
        tuple(response.ids for response in row.responses),
        tuple(response.is_finished for response in row.responses),
        trained=() if all(map(all, trained)) else trained,
    )
    return example if text is None else replace(example, text=row.text, turns=row.turns, columns=text.columns)


def _within_limit(examples: Sequence[Example], numbers: Sequence[int], path: str, limits: TokenLimits) -> list[Example]:
    """Return the examples of rows, by their numbers, that have no longer prompt."""
    lengths, limit = [len(example.prompt) for example in examples], limits.max_prompt
    too_long = [index for index, length in enumerate(lengths) if length > limit]
    if too_long and limits.long_prompts == "error":
        first = too_long[0]
        raise UserError(
            f"{path}, row {numbers[first]}: the prompt has {lengths[first]} tokens, more than "
            f"data.max_prompt_tokens={limit} ({len(too_long)} of {len(examples)} rows are too long, the longest has "
            f"{max(lengths)} tokens): set data.long_prompts=drop or a larger data.max_prompt_tokens"
        )
    if len(too_long) == len(examples):
        raise UserError(
            f"{path}: no prompt is left, as the shortest has {min(lengths)} tokens: "
            f"set data.max_prompt_tokens larger than {limit}"
        )
    return [example for example in examples if len(example.prompt) <= limit]
