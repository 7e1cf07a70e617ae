"""The forms of a data row, and how each becomes a prompt and its responses.

| form          | columns                                    | prompt and response                                    |
|---------------|--------------------------------------------|--------------------------------------------------------|
| prompt        | prompt, response or completion (optional)  | as they are: texts, or lists of messages               |
| messages      | messages                                   | the turns before the assistant's first, and the rest   |
| conversations | conversations, chosen and rejected (opt.)  | as messages, in the keys of ShareGPT                   |
| pairs         | chosen, rejected, and a prompt (optional)  | without prompt: the beginning that the two share       |
| instruction   | instruction, input, output (optional)      | the template of Stanford Alpaca                        |
| question      | question, answer (optional)                | the question and a line end                            |
| input         | input, output (optional)                   | as they are, in the column names of OpenRLHF           |
| text          | text                                       | a response to an empty prompt                          |

Where responses are sampled, the prompt of ``messages`` and ``conversations`` is all that precedes the last response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from flexrlhf.config.data_settings import Form, template_fields
from flexrlhf.data.files import Row
from flexrlhf.data.known_keys import (
    DOCUMENTS,
    EMPTY,
    EPISODE_COLUMNS,
    OPTIONS,
    SYSTEM,
    TOOLS,
    row_values,
    system_prompt,
)
from flexrlhf.data.messages import Chat, first_response, is_assistant, last_prompt, read_chat, text_or_chat
from flexrlhf.data.messages import Message as Message
from flexrlhf.data.pairs import PAIR, is_pair, prompt_columns, text_of_pair
from flexrlhf.data.row_layout import RowLayout, absent_columns, keys, missing, text_column
from flexrlhf.data.text_example import TextExample, as_chat, has_prompt, joined, marked_turns, with_system
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs

FORMS: tuple[str, ...] = get_args(Form)
NUM_RESPONSES: dict[Needs, int] = {"prompts": 0, "responses": 1, "pairs": 2}
OR_TEXT: dict[Needs, str] = {"prompts": "", "responses": ", or 'text'", "pairs": ""}
"""A further column with which a row has a form, for a message."""
DETECTED = ("conversations", "messages", "pairs", "prompt", "instruction", "question", "input")
"""Forms that a row's columns stand for, the first of several first."""
CHATS = ("messages", "conversations")
"""Forms of rows that are chats."""
RESPONSE_COLUMNS: dict[str, tuple[str, ...]] = {
    "prompt": ("response", "completion"),
    "instruction": ("output",),
    "question": ("answer",),
    "input": ("output",),
    "text": ("text",),
}
"""Columns with the response of a form, the first of which is taken."""
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
PLAIN = RowLayout()


def check_layout(layout: RowLayout, rows: list[Row], needs: Needs, path: str) -> None:
    """Raise UserError for a setting of ``columns`` with a column that no row has, unless it is an unused response."""
    unused = {name for names in RESPONSE_COLUMNS.values() for name in names} if needs == "prompts" else set()
    for name, why in absent_columns(layout.columns, rows).items():
        if name not in unused:
            raise UserError(f"{path}: data.columns has {name}: {layout.columns[name]}, {why}")


def detect_form(row: Row, needs: Needs = "prompts", layout: RowLayout = PLAIN) -> str:
    """Return the form whose columns ``row`` has; ``text`` only where one response is needed."""
    named = layout.named(row)
    # tables have a column without a value where a file of objects has none
    found = {name for name, value in named.items() if value is not None} or set(named)
    if needs == "pairs":
        return _form_of_pair(row, found)
    forms = [form for form in DETECTED if ({*PAIR} if form == "pairs" else {form}) <= found]
    # a row with several prompts has the one to which it has a response
    responding = [form for form in forms if _responds(named, form)] if needs == "responses" else []
    if forms:
        return (responding or forms)[0]
    if needs == "responses" and "text" in found:
        return "text"
    if layout.template is not None:
        return "prompt"
    raise UserError(
        "needs the columns 'prompt', or 'messages', or 'conversations', or 'chosen' and 'rejected', or 'instruction', "
        f"or 'question', or 'input'{OR_TEXT[needs]}, but has the keys {keys(row)}"
    )


def _responds(named: Row, form: str) -> bool:
    """Whether a row of which ``form`` has the prompt has a response, as far as its columns say."""
    if form == "pairs":
        return True
    if form not in CHATS:
        return any(named.get(name) is not None for name in RESPONSE_COLUMNS[form])
    last = named[form][-1] if isinstance(named[form], list) and named[form] else None
    return not is_pair(named) or isinstance(last, dict) and last.get("role", last.get("from")) in ("assistant", "gpt")


def _form_of_pair(row: Row, found: set[str]) -> str:
    """Return the form of a row whose columns ``found`` have values, where an algorithm compares two responses."""
    if {"chosen", "rejected"} <= found:
        return "conversations" if "conversations" in found else "pairs"
    raise UserError(
        "the algorithm needs preference pairs, the columns 'chosen' and 'rejected', "
        f"but the row has the keys {keys(row)}"
    )


def text_of(row: Row, form: str, layout: RowLayout = PLAIN) -> TextExample:
    """Return the prompt of ``row``, read as ``form``, and the responses that it has.

    Raises UserError, without the row's number, for a missing column or a value of another type.
    """
    named = layout.named(row)
    if form in CHATS:
        _check_no_template(form, layout)
        return _text_of_chat(named, form)
    template = layout.prompt(row)
    if form == "pairs":
        return text_of_pair(named, template, {name: PROMPTS[name] for name in ("instruction", "question")})
    prompt = PROMPTS[form](named) if template is None else template
    column = _response_column(named, form)
    responses = () if column is None else (text_or_chat(named[column], column),)
    return replace(joined(prompt, responses), is_text=form == "text")


def needed_text(row: Row, form: str, needs: Needs, layout: RowLayout = PLAIN) -> TextExample:
    """Return the prompt of ``row``, read as ``form``, with exactly the responses that ``needs`` stands for.

    Raises UserError as ``text_of``, and for a response that is missing.
    """
    example = marked_turns(_needed(row, form, needs, layout), needs)
    if not layout.is_episode and not has_prompt(example):
        raise UserError(
            f"the prompt is empty; the row has the keys {keys(row)}: name the prompt's column as in "
            f"data.columns={{prompt: question}}, or leave such rows out by data.bad_rows=drop"
        )
    example = _with_values(example, layout.named(row), form, layout)
    if layout.makes_chats:
        example = as_chat(example)
    return example if layout.system is None else with_system(example, layout.system)


def _with_values(example: TextExample, named: Row, form: str, layout: RowLayout) -> TextExample:
    """Return an example with what its row's columns give to a chat template, and with the names of unread ones."""
    used = {*_columns(named, form), *template_fields(layout.template or "")}
    # an environment reads columns of its own
    used |= {*EPISODE_COLUMNS} if layout.is_episode else set()
    others = {name: value for name, value in named.items() if value not in EMPTY and name not in used}
    values, system = row_values(others), system_prompt(others)
    if values and layout.is_episode:
        raise UserError("the row has tools or variables of the chat template, which an environment's turns do not have")
    if system is not None and example.is_text:
        raise UserError("the row has a system prompt, but is a text of pretraining: remove one of them")
    chat = example if system is None else with_system(example, system)
    is_said = system is None or chat.turns[0].content == system
    read = {*TOOLS, OPTIONS, DOCUMENTS, *(SYSTEM if is_said else ()), *layout.columns}
    unread = (*example.unread, *(f"column {name!r}" for name in others if name not in read))
    return replace(chat, values=values, unread=unread)


def gives_system(row: Row, layout: RowLayout) -> bool:
    """Whether a row has a system prompt in a column, which makes its text a chat."""
    named = layout.named(row)
    return any(named.get(name) and name not in template_fields(layout.template or "") for name in SYSTEM)


def _columns(named: Row, form: str) -> tuple[str, ...]:
    """Return the columns that a form reads, also those of responses that are not needed."""
    if form == "pairs":
        return (*PAIR, *prompt_columns(named))
    if form == "conversations":
        return (form, *PAIR) if is_pair(named) else (form,)
    further = ("input",) if form == "instruction" else ()
    return (form, *further, *RESPONSE_COLUMNS.get(form, ()))


def has_response(row: Row, form: str, layout: RowLayout = PLAIN) -> bool:
    """Whether ``row``, read as ``form``, has a response. Raises UserError as ``text_of``."""
    named = layout.named(row)
    if form == "messages" or (form == "conversations" and not is_pair(named)):
        return any(map(is_assistant, read_chat(named.get(form), form)))
    return form in ("pairs", "conversations") or _response_column(named, form) is not None


def _needed(row: Row, form: str, needs: Needs, layout: RowLayout) -> TextExample:
    if needs == "prompts":
        return _prompt_alone(row, form, layout)
    if needs == "pairs" and form not in ("pairs", "conversations"):
        raise UserError(
            f"preference pairs need the columns 'chosen' and 'rejected', but data.form is {form!r} "
            f"and the row has the keys {keys(row)}"
        )
    if needs == "pairs" and not is_pair(named := layout.named(row)) and form == "conversations":
        raise UserError(missing(named, *(name for name in ("chosen", "rejected") if named.get(name) is None)))
    example = text_of(row, form, layout)
    if not example.responses and not example.completions:
        raise UserError(missing(layout.named(row), RESPONSE_COLUMNS[form][0]))
    return example.first(NUM_RESPONSES[needs])


def _prompt_alone(row: Row, form: str, layout: RowLayout) -> TextExample:
    """Return the prompt of ``row``; a response that is not used may be of any type."""
    named = layout.named(row)
    if form in CHATS:
        _check_no_template(form, layout)
        if form == "conversations" and is_pair(named):
            return _text_of_chat(named, form).first(0)
        return TextExample("", turns=last_prompt(_chat(named, form), form))
    if form in PROMPTS:
        template = layout.prompt(row)
        return joined(PROMPTS[form](named) if template is None else template, ())
    return text_of(row, form, layout).first(0)


def _text_of_chat(row: Row, form: str) -> TextExample:
    chat = _chat(row, form)
    if form == "conversations" and is_pair(row):
        return joined(chat, tuple(text_or_chat(row[name], name) for name in PAIR))
    prompt, response = first_response(chat, form)
    return TextExample("", turns=prompt, completions=(response,))


def _chat(row: Row, form: str) -> Chat:
    if form not in row:
        raise UserError(missing(row, form))
    return read_chat(row[form], form)


def _check_no_template(form: str, layout: RowLayout) -> None:
    if layout.template is not None:
        raise UserError(f"data.template makes a prompt of columns, but form {form!r} has chats; remove one of them")


def _response_column(row: Row, form: str) -> str | None:
    """Return the column with a form's response, the first that has a value; None if the row has none."""
    present = [name for name in RESPONSE_COLUMNS[form] if name in row]
    return next((name for name in present if row[name] is not None), present[0] if present else None)


def _text_or_chat_column(row: Row, name: str) -> str | Chat:
    if name not in row:
        raise UserError(missing(row, name))
    return text_or_chat(row[name], name)


def _instruction_prompt(row: Row) -> str:
    context = text_column(row, "input") if row.get("input") else ""
    template, instruction = (
        ALPACA_TEMPLATES["with_input" if context else "without_input"],
        text_column(row, "instruction"),
    )
    # nothing to put into the template is no prompt
    return template.format(instruction=instruction, input=context) if (instruction + context).strip() else ""


PROMPTS: dict[str, Callable[[Row], str | Chat]] = {
    "prompt": lambda row: _text_or_chat_column(row, "prompt"),
    "instruction": _instruction_prompt,
    "question": lambda row: QUESTION_TEMPLATE.format(question=text_column(row, "question")),
    "input": lambda row: _text_or_chat_column(row, "input"),
    "text": lambda _: "",
}
"""Forms whose prompt does not depend on their responses."""
