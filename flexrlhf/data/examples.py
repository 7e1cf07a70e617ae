"""Examples: the rows of a data file, as text and as token ids.

``files`` reads the rows, ``forms`` makes a prompt and responses of each, ``chat`` renders those that are chats,
``encoding`` makes token ids, ``order`` says which step takes which example.
Everything is a pure function of its arguments; whatever a user can mend raises ``UserError`` with the row's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flexrlhf.config.data_settings import LongPrompts
from flexrlhf.data.chat import DEFAULT_CHAT, ChatFormat
from flexrlhf.data.encoding import EncodedRow, RowEncoder, Tokenizer, bos_in_front
from flexrlhf.data.files import Row, read_rows
from flexrlhf.data.forms import FORMS, PLAIN, TextExample, check_layout, detect_form, needed_text
from flexrlhf.data.messages import Chat
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.graph import Needs


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a run, in tokens.

    max_prompt:    tokens of the longest prompt
    max_response:  tokens at which responses are truncated
    long_prompts:  whether longer prompts are refused, dropped or truncated
    """

    max_prompt: int
    max_response: int
    long_prompts: LongPrompts = "error"

    @property
    def drops(self) -> bool:
        """Whether rows with longer prompts are left out."""
        return not self.long_prompts.startswith("truncate")


@dataclass(frozen=True)
class DataCounts:
    """Rows of a file, before any is left out or truncated.

    form:       of the rows
    num_rows:   of the file; where it is large, only some of them are counted
    prompts:    tokens of the prompt of each counted row
    responses:  tokens of the responses of each counted row, end tokens included
    limits:     of the run
    controls:   of each counted row with control tokens in its text, one that is encoded as such, and one as text; or ""
    """

    form: str
    num_rows: int
    prompts: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    limits: TokenLimits
    controls: tuple[tuple[str, str], ...] = ()

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


def quantile(lengths: Sequence[int], share: float) -> int:
    """Return the smallest of ``lengths`` that at least ``share`` of them do not exceed; 0 without any."""
    ordered = sorted(lengths)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0


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

    def is_trained(self, response: int) -> tuple[bool, ...]:
        """Return for each token of a response whether it is trained on."""
        return self.trained[response] if self.trained else (True,) * len(self.responses[response])


EXAMPLES = TypeAdapter(list[Example])
"""JSON of examples."""


@dataclass(frozen=True)
class LoadedExamples:
    """Rows of a data file that a run uses. ``counts``: lengths of all rows, before some were left out or truncated."""

    examples: list[Example]
    counts: DataCounts


def load_examples(
    path: Path | str,
    *,
    form: str = "auto",
    needs: Needs,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    max_response_tokens: int,
    long_prompts: LongPrompts = "error",
    with_columns: bool = False,
    layout: RowLayout = PLAIN,
    chat: ChatFormat = DEFAULT_CHAT,
    rows: list[Row] | None = None,
) -> LoadedExamples:
    """Read and tokenise a data file, in file order, or ``rows`` that a program has made, which ``path`` names.

    ``form="auto"`` takes the form of the first row for all rows. ``needs``: how many responses to keep: none, the
    first, or two. Responses are truncated at ``max_response_tokens`` (eos counts). A prompt of more than
    ``max_prompt_tokens`` (bos counts) raises UserError, is left out or truncated, as ``long_prompts`` says. ``chat``:
    which rows a chat template renders.
    """
    path, examples, lengths, found = str(path), [], [], list[tuple[str, str]]()
    encoder = RowEncoder(tokenizer, chat, max_response_tokens)
    form, texts = _read(path, form, needs, layout, rows)
    for number, text in enumerate(texts, start=1):
        with _in_row(path, number):
            row = encoder.encode(text)
            example = _example(row)
            if with_columns:
                example = replace(example, text=row.text, turns=row.turns, columns=text.columns)
            examples.append(example)
            lengths.append(tuple(response.length for response in row.responses))
            found += [(row.control, row.escaped)] * bool(row.control or row.escaped)
    limits = TokenLimits(max_prompt_tokens, max_response_tokens, long_prompts)
    prompts = tuple(len(example.prompt) for example in examples)
    counts = DataCounts(form, len(examples), prompts, tuple(lengths), limits, tuple(found))
    if limits.drops:
        return LoadedExamples(_within_limit(examples, path, max_prompt_tokens, long_prompts), counts)
    is_left, bos = long_prompts == "truncate-left", next(iter(bos_in_front(tokenizer)), None)
    shorter = [truncated(example.prompt, max_prompt_tokens, is_left, bos) for example in examples]
    return LoadedExamples([replace(each, prompt=ids) for each, ids in zip(examples, shorter, strict=True)], counts)


def truncated(prompt: tuple[int, ...], limit: int, is_left: bool, bos: int | None) -> tuple[int, ...]:
    """Return at most ``limit`` tokens of a prompt, without its first or its last ones; bos in front stays."""
    if len(prompt) <= limit:
        return prompt
    front = 1 if is_left and prompt[0] == bos else 0
    return prompt[:front] + prompt[len(prompt) - limit + front :] if is_left else prompt[:limit]


def read_texts(path: Path | str, *, form: str = "auto", needs: Needs, layout: RowLayout = PLAIN) -> list[TextExample]:
    """Read a data file as text, with all checks that need no tokenizer."""
    return _read(str(path), form, needs, layout)[1]


def found_form(path: str, rows: Sequence[Row], form: str, needs: Needs, layout: RowLayout) -> str:
    """Return the form of ``rows``, for ``auto`` that of the first one. Raises UserError if it is not known."""
    known = ["auto", *FORMS]
    if form not in known:
        raise UserError(f"data.form={form} is not one of {', '.join(known)}{nearest(form, known)}")
    check_layout(layout, list(rows), needs, path)
    if form != "auto":
        return form
    with _in_row(path, 1):
        return detect_form(rows[0], needs, layout)


def _read(
    path: str, form: str, needs: Needs, layout: RowLayout, rows: list[Row] | None = None
) -> tuple[str, list[TextExample]]:
    """Return the form of a file's rows, and the rows as text."""
    rows = read_rows(path) if rows is None else rows
    form = found_form(path, rows, form, needs, layout)
    texts = []
    for number, row in enumerate(rows, start=1):
        with _in_row(path, number):
            texts.append(replace(needed_text(row, form, needs, layout), columns=layout.all_columns(row)))
    return form, texts


@contextmanager
def _in_row(path: Path | str, number: int) -> Iterator[None]:
    """Put the file and the row's number in front of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}, row {number}: {error}") from None


def _example(row: EncodedRow) -> Example:
    trained = tuple(response.is_trained for response in row.responses)
    return Example(
        row.prompt,
        tuple(response.ids for response in row.responses),
        tuple(response.is_finished for response in row.responses),
        trained=() if all(map(all, trained)) else trained,
    )


def _within_limit(examples: Sequence[Example], path: str, limit: int, long_prompts: str) -> list[Example]:
    lengths = [len(example.prompt) for example in examples]
    too_long = [row for row, length in enumerate(lengths, start=1) if length > limit]
    if too_long and long_prompts == "error":
        row = too_long[0]
        raise UserError(
            f"{path}, row {row}: the prompt has {lengths[row - 1]} tokens, more than data.max_prompt_tokens={limit} "
            f"({len(too_long)} of {len(examples)} rows are too long, the longest has {max(lengths)} tokens): "
            "set data.long_prompts=drop or a larger data.max_prompt_tokens"
        )
    if len(too_long) == len(examples):
        raise UserError(
            f"{path}: no prompt is left, as the shortest has {min(lengths)} tokens: "
            f"set data.max_prompt_tokens larger than {limit}"
        )
    return [example for example in examples if len(example.prompt) <= limit]
