"""The five forms of a data row, and how each becomes a prompt and its responses.

| form        | columns                               | prompt and response                          |
|-------------|---------------------------------------|----------------------------------------------|
| prompt      | prompt, response (optional)           | as they are                                  |
| pairs       | chosen, rejected, prompt (optional)   | without prompt: the dialogues' common start  |
| instruction | instruction, input, output (optional) | the template of Stanford Alpaca              |
| question    | question, answer (optional)           | the question and a line end                  |
| text        | text                                  | a response to an empty prompt                |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, Literal

from flexrlhf.data.files import Row, json_type
from flexrlhf.errors import UserError, nearest

Needs = Literal["prompts", "responses", "pairs"]
"""Responses that an algorithm needs with each prompt: none, one, or a chosen and a rejected one."""

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


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    role:     ``system``, ``user``, ``assistant`` or another one that the chat template takes
    content:  its text
    """

    role: str
    content: str


@dataclass(frozen=True)
class TextExample:
    """A row as text or as a chat.

    prompt:       the prompt, as the form's template makes it; empty where it is a chat
    responses:    none, one, or (chosen, rejected); none where they are messages
    is_text:      whether the row is of form ``text``, which has no prompt
    turns:        the prompt as a chat
    completions:  the responses as messages, one or several turns each
    columns:      all columns of the row
    """

    prompt: str
    responses: tuple[str, ...] = ()
    is_text: bool = False
    turns: tuple[Message, ...] = ()
    completions: tuple[tuple[Message, ...], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)


def check_form(form: str) -> None:
    """Raise UserError for a form that is neither ``auto`` nor one of FORMS."""
    known = ["auto", *FORMS]
    if form not in known:
        raise UserError(f"data.form={form} is not one of {', '.join(known)}{nearest(form, known)}")


def detect_form(row: Row, needs: Needs = "prompts") -> str:
    """Return the form whose columns ``row`` has; ``text`` only where one response is needed."""
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
    """Return the prompt of ``row``, read as ``form``, and the responses that it has.

    Raises UserError, without the row's number, for a missing column or a value that is no string.
    """
    if form == "pairs":
        return _text_of_pair(row)
    column = RESPONSE_COLUMNS[form]
    return TextExample(PROMPTS[form](row), (_column(row, column),) if column in row else ())


def needed_text(row: Row, form: str, needs: Needs) -> TextExample:
    """Return the prompt of ``row``, read as ``form``, with exactly the responses that ``needs`` stands for.

    Raises UserError as ``text_of``, and for a response that is missing.
    """
    if needs == "prompts" and form != "pairs":
        return TextExample(PROMPTS[form](row))  # a response that is not used may be of any type
    if needs == "pairs" and form != "pairs":
        raise UserError(
            f"preference pairs need the columns 'chosen' and 'rejected', but data.form is {form!r} "
            f"and the row has the keys {_keys(row)}"
        )
    text = text_of(row, form)
    if not text.responses:
        raise UserError(_missing(row, RESPONSE_COLUMNS[form]))
    return TextExample(text.prompt, text.responses[: NUM_RESPONSES[needs]], is_text=form == "text")


def split_dialogues(chosen: str, rejected: str) -> TextExample:
    """Split two dialogues after the last ``"\\n\\nAssistant:"`` up to which they agree.

    The responses keep their leading space. Texts without such a place are two responses to an empty prompt.
    """
    common = commonprefix([chosen, rejected])
    turn = common.rfind(ASSISTANT)
    end = turn + len(ASSISTANT) if turn >= 0 else 0
    return TextExample(chosen[:end], (chosen[end:], rejected[end:]))


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


def _column(row: Row, name: str) -> str:
    if name not in row:
        raise UserError(_missing(row, name))
    value = row[name]
    if not isinstance(value, str):
        raise UserError(f"{name!r} must be a string, found {json_type(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise UserError(f"{name!r} contains half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return value


def _missing(row: Row, name: str) -> str:
    return f"needs the column {name!r}, but has the keys {_keys(row)}"


def _keys(row: Row) -> str:
    return ", ".join(repr(key) for key in row) or "(none)"
