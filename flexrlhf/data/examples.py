"""Reading prompts, demonstrations and preference pairs, and the order in which training visits them.

A data file is ``.jsonl``, ``.jsonl.gz`` or ``.json`` (a list) of objects in one of five forms::

    prompt       {"prompt", "response"?}             taken as it is
    pairs        {"chosen", "rejected", "prompt"?}   without "prompt": whole dialogues, whose common part is the prompt
    instruction  {"instruction", "input"?, "output"?}
    question     {"question", "answer"?}
    text         {"text"}                            a response to an empty prompt

Everything here is a pure function of its arguments; whatever a user can mend raises ``UserError``.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, Protocol

from flexrlhf.errors import UserError, nearest

Row = dict[str, Any]
Needs = Literal["prompts", "responses", "pairs"]

NUM_RESPONSES: dict[Needs, int] = {"prompts": 0, "responses": 1, "pairs": 2}
RESPONSE_COLUMNS = {"prompt": "response", "instruction": "output", "question": "answer", "text": "text"}
ASSISTANT = "\n\nAssistant:"
QUESTION_TEMPLATE = "{question}\n"
# The templates published with Stanford Alpaca; models tuned on its data expect them to the letter.
ALPACA_TEMPLATES = {
    "without_input": (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:"
    ),
    "with_input": (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
    ),
}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that data loading needs."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class TextExample:
    """A row as text: the prompt and 0, 1 or 2 (chosen, rejected) responses. ``is_text``: by its form without prompt."""

    prompt: str
    responses: tuple[str, ...] = ()
    is_text: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Example:
    """A row as token ids; ``text``: its prompt, ``columns``: all that the file has of it, where that is asked for.

    ``prompt`` starts with bos where the tokenizer has one and is never empty. ``responses`` holds 0 (prompts),
    1 (demonstrations) or 2 (chosen, rejected) entries. ``finished[i]`` says that response i ends with eos; it is
    False where the response was cut at ``max_response_tokens``.
    """

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]
    text: str = field(default="", compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)


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

    ``form="auto"`` takes the form of the first row for all rows. ``needs`` says how many responses to keep: none,
    the first, or two. Responses are cut at ``max_response_tokens`` (eos counts); prompts are never cut: one of more
    than ``max_prompt_tokens`` (bos counts) is an error or, with ``long_prompts="drop"``, left out.
    """
    path = Path(path)
    examples = []
    for number, text in enumerate(read_texts(path, form=form, needs=needs), start=1):
        with _in_row(path, number):
            example = _encode(text, tokenizer, max_response_tokens)
            examples.append(replace(example, text=text.prompt, columns=text.columns) if with_columns else example)
    return _within_limit(examples, path, max_prompt_tokens, long_prompts)


def read_texts(path: Path | str, *, form: str = "auto", needs: Needs) -> list[TextExample]:
    """Read a data file as text: all of its checks that need no tokenizer."""
    path = Path(path)
    rows = read_rows(path)
    form = _resolve_form(form, rows[0], path, needs)
    texts = []
    for number, row in enumerate(rows, start=1):
        with _in_row(path, number):
            texts.append(replace(_needed_text(row, form, needs), columns=row))
    return texts


@contextmanager
def _in_row(path: Path, number: int) -> Iterator[None]:
    """Say where a row's problem is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}, row {number}: {error}") from None


def step_indices(seed: int, step: int, num_prompts: int, num_examples: int) -> list[int]:
    """Return the ``num_prompts`` example indices of ``step``, a pure function of its arguments.

    Step ``s`` takes positions ``s * num_prompts`` onwards of an endless sequence: epoch after epoch, each its own
    permutation of ``range(num_examples)``. A resumed run therefore needs nothing but the step number.
    """
    first = step * num_prompts
    last = first + num_prompts - 1
    order: list[int] = []
    for epoch in range(first // num_examples, last // num_examples + 1):
        start = epoch * num_examples
        order += _permutation(seed, epoch, num_examples)[max(first - start, 0) : last + 1 - start]
    return order


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_examples: int) -> list[int]:
    order = list(range(num_examples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


# --- files -----------------------------------------------------------------------------------------------------------


def read_rows(path: Path | str) -> list[Row]:
    """Return the objects of a ``.jsonl``, ``.jsonl.gz`` or ``.json`` file; at least one, else ``UserError``."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no data file {path}{_nearest_file(path)}")
    rows = _parse(path, _read_text(path))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number}: a row must be a JSON object, found {_json_type(row)}")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist"
    return nearest(path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.is_file()))


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _parse(path: Path, text: str) -> list[Any]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        # Not splitlines(): JSON strings may hold U+2028 and other characters that it takes for line ends.
        lines = text.rstrip().split("\n") if text.strip() else []
        return [_parse_json(path, line, number) for number, line in enumerate(lines, start=1)]
    if path.suffix != ".json":
        raise UserError(f"cannot read {path}: its name must end in .jsonl, .jsonl.gz or .json")
    rows = _parse_json(path, text, 1)
    if not isinstance(rows, list):
        raise UserError(f"{path} must hold a list of objects, found {_json_type(rows)}")
    return rows


def _parse_json(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path}, line {line}: not JSON ({error.msg} at column {error.colno})") from None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# --- forms -----------------------------------------------------------------------------------------------------------


def detect_form(row: Row, needs: Needs = "prompts") -> str:
    """Return the form whose columns ``row`` has: ``pairs``, ``instruction``, ``question`` or ``prompt``; ``text`` where
    a response without a prompt serves."""
    if "chosen" in row and "rejected" in row:
        return "pairs"
    for form in ("instruction", "question", "prompt", *(["text"] if needs == "responses" else [])):
        if form in row:
            return form
    raise UserError(
        "needs the columns 'prompt', or 'chosen' and 'rejected', or 'instruction', or 'question', "
        f"but has the keys {_keys(row)}"
    )


def text_of(row: Row, form: str) -> TextExample:
    """Return the prompt and whichever responses ``row`` has, read as ``form``.

    Raises ``UserError`` (without a row number: the caller knows it) for a missing column or a value that is no string.
    """
    if form == "pairs":
        return _text_of_pair(row)
    column = RESPONSE_COLUMNS[form]
    return TextExample(PROMPTS[form](row), (_column(row, column),) if column in row else ())


def _text_of_pair(row: Row) -> TextExample:
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    if "prompt" in row:
        return TextExample(_column(row, "prompt"), (chosen, rejected))
    return split_dialogues(chosen, rejected)


def _plain_prompt(row: Row) -> str:
    return _column(row, "prompt")


def _instruction_prompt(row: Row) -> str:
    context = _column(row, "input") if row.get("input") else ""
    template = ALPACA_TEMPLATES["with_input" if context else "without_input"]
    return template.format(instruction=_column(row, "instruction"), input=context)


def _question_prompt(row: Row) -> str:
    return QUESTION_TEMPLATE.format(question=_column(row, "question"))


PROMPTS: dict[str, Callable[[Row], str]] = {
    "prompt": _plain_prompt,
    "instruction": _instruction_prompt,
    "question": _question_prompt,
    "text": lambda _: "",
}
FORMS = ("pairs", *PROMPTS)


def split_dialogues(chosen: str, rejected: str) -> TextExample:
    """Cut two dialogues behind the last ``"\\n\\nAssistant:"`` up to which they agree.

    The responses keep their leading space. Texts without such a place are two responses to an empty prompt.
    """
    common = commonprefix([chosen, rejected])
    turn = common.rfind(ASSISTANT)
    cut = turn + len(ASSISTANT) if turn >= 0 else 0
    return TextExample(chosen[:cut], (chosen[cut:], rejected[cut:]))


def _resolve_form(form: str, first_row: Row, path: Path, needs: Needs) -> str:
    if form == "auto":
        try:
            return detect_form(first_row, needs)
        except UserError as error:
            raise UserError(f"{path}, row 1: {error}") from None
    if form not in FORMS:
        known = ["auto", *FORMS]
        raise UserError(f"data.form={form} is not one of {', '.join(known)}{nearest(form, known)}")
    return form


def _needed_text(row: Row, form: str, needs: Needs) -> TextExample:
    if needs == "prompts" and form != "pairs":
        return TextExample(PROMPTS[form](row))  # a response that nobody reads may be of any type
    if needs == "pairs" and form != "pairs":
        raise UserError(
            f"preference pairs need the columns 'chosen' and 'rejected', but data.form is {form!r} "
            f"and the row has the keys {_keys(row)}"
        )
    text = text_of(row, form)
    if not text.responses:
        raise UserError(_missing(row, RESPONSE_COLUMNS[form]))
    return TextExample(text.prompt, text.responses[: NUM_RESPONSES[needs]], is_text=form == "text")


def _column(row: Row, name: str) -> str:
    if name not in row:
        raise UserError(_missing(row, name))
    value = row[name]
    if not isinstance(value, str):
        raise UserError(f"{name!r} must be a string, found {_json_type(value)}")
    return value


def _missing(row: Row, name: str) -> str:
    return f"needs the column {name!r}, but has the keys {_keys(row)}"


def _keys(row: Row) -> str:
    return ", ".join(repr(key) for key in row) or "(none)"


# --- tokens ----------------------------------------------------------------------------------------------------------


def _encode(text: TextExample, tokenizer: Tokenizer, max_response_tokens: int) -> Example:
    prompt = _encode_prompt(text, tokenizer)
    responses = [_encode_response(response, tokenizer, max_response_tokens) for response in text.responses]
    return Example(prompt, tuple(ids for ids, _ in responses), tuple(finished for _, finished in responses))


def _encode_prompt(text: TextExample, tokenizer: Tokenizer) -> tuple[int, ...]:
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    ids = (*bos, *tokenizer.encode(text.prompt, add_special_tokens=False))
    if not ids and text.is_text and tokenizer.eos_token_id is not None:
        return (tokenizer.eos_token_id,)  # between texts of pretraining, where there is no bos
    if not ids:
        raise UserError("the prompt is empty, and the tokenizer has no bos token to stand for it")
    return ids


def _encode_response(response: str, tokenizer: Tokenizer, limit: int) -> tuple[tuple[int, ...], bool]:
    """Return the ids, at most ``limit`` with eos, and whether eos still fitted."""
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
