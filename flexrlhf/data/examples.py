"""Examples: the rows of a data file, as text and as token ids.

``files`` reads the rows, ``forms`` makes a prompt and responses of each, ``order`` says which step takes which example.
Everything is a pure function of its arguments; whatever a user can mend raises ``UserError`` with the row's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from flexrlhf.data.files import read_rows
from flexrlhf.data.forms import Message, Needs, TextExample, check_form, detect_form, needed_text
from flexrlhf.errors import UserError


class Tokenizer(Protocol):
    """Part of a Hugging Face tokenizer that data loading needs."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Example:
    """A row as token ids.

    prompt:     token ids, never empty; the first is bos where the tokenizer has one
    responses:  none (prompts), one (demonstrations) or two (chosen, rejected)
    finished:   for each response whether it ends with eos; False where it was truncated at ``max_response_tokens``
    text:       the prompt as text, with ``with_columns`` only
    columns:    all columns of the row, with ``with_columns`` only
    turns:      the prompt as a chat, where it is one, with ``with_columns`` only
    """

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]
    text: str = field(default="", compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    turns: tuple[Message, ...] = field(default=(), compare=False)


def load_examples(
    path: Path | str,
    *,
    form: str = "auto",
    needs: Needs,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    max_response_tokens: int,
    long_prompts: Literal["error", "drop"] = "error",
    with_columns: bool = False,
) -> list[Example]:
    """Read and tokenise a data file, in file order.

    ``form="auto"`` takes the form of the first row for all rows. ``needs``: how many responses to keep: none, the
    first, or two. Responses are truncated at ``max_response_tokens`` (eos counts); prompts never are: one of more than
    ``max_prompt_tokens`` (bos counts) raises UserError or, with ``long_prompts="drop"``, is left out.
    """
    path = Path(path)
    examples = []
    for number, text in enumerate(read_texts(path, form=form, needs=needs), start=1):
        with _in_row(path, number):
            example = _encode(text, tokenizer, max_response_tokens)
            if with_columns:
                example = replace(example, text=text.prompt, turns=text.turns, columns=text.columns)
            examples.append(example)
    return _within_limit(examples, path, max_prompt_tokens, long_prompts)


def read_texts(path: Path | str, *, form: str = "auto", needs: Needs) -> list[TextExample]:
    """Read a data file as text, with all checks that need no tokenizer."""
    path = Path(path)
    rows = read_rows(path)
    check_form(form)
    if form == "auto":
        with _in_row(path, 1):
            form = detect_form(rows[0], needs)
    texts = []
    for number, row in enumerate(rows, start=1):
        with _in_row(path, number):
            texts.append(replace(needed_text(row, form, needs), columns=row))
    return texts


@contextmanager
def _in_row(path: Path, number: int) -> Iterator[None]:
    """Put the file and the row's number in front of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}, row {number}: {error}") from None


def _encode(text: TextExample, tokenizer: Tokenizer, max_response_tokens: int) -> Example:
    prompt = _encode_prompt(text, tokenizer)
    responses = [_encode_response(response, tokenizer, max_response_tokens) for response in text.responses]
    return Example(prompt, tuple(ids for ids, _ in responses), tuple(finished for _, finished in responses))


def _encode_prompt(text: TextExample, tokenizer: Tokenizer) -> tuple[int, ...]:
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    ids = (*bos, *tokenizer.encode(text.prompt, add_special_tokens=False))
    if not ids and text.is_text and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)  # what separates texts of pretraining, where there is no bos
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no bos token to stand for it")
    return ids


def _encode_response(response: str, tokenizer: Tokenizer, limit: int) -> tuple[tuple[int, ...], bool]:
    """Return the token ids, at most ``limit`` with eos, and whether eos is among them."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos token, so a response cannot end")
    ids = (*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id)
    return ids[:limit], len(ids) <= limit


def _within_limit(examples: Sequence[Example], path: Path, limit: int, long_prompts: str) -> list[Example]:
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
