"""The forms of a data row, and how each becomes a prompt and its responses.

| form          | columns                                    | prompt and response                                    |
|---------------|--------------------------------------------|--------------------------------------------------------|
| prompt        | prompt, response or completion (optional)  | as they are: texts, or lists of messages               |
| messages      | messages                                   | the turns before the assistant's first, and the rest   |
| conversations | conversations, chosen and rejected (opt.)  | as messages, in the keys of ShareGPT                   |
| pairs         | chosen, rejected, prompt (optional)        | without prompt: the beginning that the two share       |
| instruction   | instruction, input, output (optional)      | the template of Stanford Alpaca                        |
| question      | question, answer (optional)                | the question and a line end                            |
| input         | input, output (optional)                   | as they are, in the column names of OpenRLHF           |
| text          | text                                       | a response to an empty prompt                          |

Where responses are sampled, the prompt of ``messages`` and ``conversations`` is all that precedes the last response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any, get_args

from flexrlhf.config.data_settings import Form
from flexrlhf.data.files import Row
from flexrlhf.data.messages import (
    Chat,
    dialogue_turns,
    first_response,
    is_assistant,
    is_dialogue,
    last_prompt,
    read_chat,
    split_chats,
    text_or_chat,
)
from flexrlhf.data.messages import Message as Message
from flexrlhf.data.row_layout import RowLayout, absent_columns, keys, missing, text_column
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs

FORMS: tuple[str, ...] = get_args(Form)
NUM_RESPONSES: dict[Needs, int] = {"prompts": 0, "responses": 1, "pairs": 2}
OR_TEXT: dict[Needs, str] = {"prompts": "", "responses": ", or 'text'", "pairs": ""}
"""A further column with which a row has a form, for a message."""
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
PLAIN = RowLayout()


@dataclass(frozen=True)
class TextExample:
    """A row as text or as a chat.

    prompt:       the prompt, as the form's template makes it; empty if it is a chat
    responses:    none, one, or (chosen, rejected); none where they are messages
    is_text:      whether the row is of form ``text``, which has no prompt
    turns:        the prompt as a chat
    completions:  the responses as messages, one or several turns each
    columns:      all columns of the row
    """

    prompt: str
    responses: tuple[str, ...] = ()
    is_text: bool = False
    turns: Chat = ()
    completions: tuple[Chat, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def first(self, number: int) -> TextExample:
        """Return this example with its first responses alone."""
        return replace(self, responses=self.responses[:number], completions=self.completions[:number])


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
    for form in ("conversations", "messages", "pairs", "instruction", "question", "prompt", "input"):
        if ({"chosen", "rejected"} if form == "pairs" else {form}) <= found:
            return form
    if needs == "responses" and "text" in found:
        return "text"
    if layout.template is not None:
        return "prompt"
    raise UserError(
        "needs the columns 'prompt', or 'messages', or 'conversations', or 'chosen' and 'rejected', or 'instruction', "
        f"or 'question', or 'input'{OR_TEXT[needs]}, but has the keys {keys(row)}"
    )


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
        return _text_of_pair(named, template)
    prompt = PROMPTS[form](named) if template is None else template
    column = _response_column(named, form)
    responses = () if column is None else (text_or_chat(named[column], column),)
    return replace(_joined(prompt, responses), is_text=form == "text")


def needed_text(row: Row, form: str, needs: Needs, layout: RowLayout = PLAIN) -> TextExample:
    """Return the prompt of ``row``, read as ``form``, with exactly the responses that ``needs`` stands for.

    Raises UserError as ``text_of``, and for a response that is missing.
    """
    example = _needed(row, form, needs, layout)
    return example if layout.system is None else with_system(example, layout.system)


def has_response(row: Row, form: str, layout: RowLayout = PLAIN) -> bool:
    """Whether ``row``, read as ``form``, has a response. Raises UserError as ``text_of``."""
    named = layout.named(row)
    if form == "messages" or (form == "conversations" and not _is_pair(named)):
        return any(map(is_assistant, read_chat(named.get(form), form)))
    return form in ("pairs", "conversations") or _response_column(named, form) is not None


def as_chat(example: TextExample) -> TextExample:
    """Return an example of text as a chat: dialogues as in hh-rlhf by their turns, other prompts as one user turn."""
    if example.turns or example.is_text:
        return example
    read = _dialogue_response if is_dialogue(example.prompt) else lambda text: (Message("assistant", text),)
    completions = tuple(read(response) for response in example.responses)
    return TextExample("", turns=dialogue_turns(example.prompt), completions=completions, columns=example.columns)


def with_system(example: TextExample, system: str) -> TextExample:
    """Return an example as a chat with a system prompt, unless it has one of its own or is a text of pretraining."""
    chat = as_chat(example)
    if example.is_text or chat.turns[0].role in ("system", "developer"):
        return chat
    return replace(chat, turns=(Message("system", system), *chat.turns))


def split_dialogues(chosen: str, rejected: str) -> TextExample:
    """Split two dialogues after the last ``"\\n\\nAssistant:"`` up to which they agree.

    The responses keep their leading space. Texts without such a place are two responses to an empty prompt.
    """
    common = commonprefix([chosen, rejected])
    turn = common.rfind(ASSISTANT)
    end = turn + len(ASSISTANT) if turn >= 0 else 0
    return TextExample(chosen[:end], (chosen[end:], rejected[end:]))


def _needed(row: Row, form: str, needs: Needs, layout: RowLayout) -> TextExample:
    if needs == "prompts":
        return _prompt_alone(row, form, layout)
    if needs == "pairs" and form not in ("pairs", "conversations"):
        raise UserError(
            f"preference pairs need the columns 'chosen' and 'rejected', but data.form is {form!r} "
            f"and the row has the keys {keys(row)}"
        )
    if needs == "pairs" and not _is_pair(named := layout.named(row)) and form == "conversations":
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
        if form == "conversations" and _is_pair(named):
            return _text_of_chat(named, form).first(0)
        return TextExample("", turns=last_prompt(_with_system_column(named, form), form))
    if form in PROMPTS:
        template = layout.prompt(row)
        return _joined(PROMPTS[form](named) if template is None else template, ())
    return text_of(row, form, layout).first(0)


def _text_of_chat(row: Row, form: str) -> TextExample:
    chat = _with_system_column(row, form)
    if form == "conversations" and _is_pair(row):
        return _joined(chat, tuple(text_or_chat(row[name], name) for name in ("chosen", "rejected")))
    prompt, response = first_response(chat, form)
    return TextExample("", turns=prompt, completions=(response,))


def _with_system_column(row: Row, form: str) -> Chat:
    """Return the chat of a row; a text in ``system`` comes first, as LLaMA-Factory has it next to conversations."""
    if form not in row:
        raise UserError(missing(row, form))
    _check_unread(row, "tools")
    chat = read_chat(row[form], form)
    if not row.get("system") or form != "conversations" or chat[0].role == "system":
        return chat
    return (Message("system", text_column(row, "system")), *chat)


def _check_no_template(form: str, layout: RowLayout) -> None:
    if layout.template is not None:
        raise UserError(f"data.template makes a prompt of columns, but form {form!r} has chats; remove one of them")


def _check_unread(row: Row, column: str) -> None:
    """Raise UserError for a column that other tools render as a part of the prompt."""
    if row.get(column):
        raise UserError(f"{column!r} has a value, which is not rendered; make it a part of 'messages', or remove it")


def _is_pair(row: Row) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None


def _text_of_pair(row: Row, template: str | None) -> TextExample:
    chosen, rejected = (_text_or_chat_column(row, name) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError("'chosen' and 'rejected' must be two strings or two lists of messages, found one of each")
    has_prompt = template is not None or row.get("prompt") is not None
    prompt = template if template is not None else text_or_chat(row["prompt"], "prompt") if has_prompt else ""
    if not isinstance(chosen, str) and not isinstance(rejected, str):
        # lists that begin with the user's turn contain the prompt, of which a column of text is a copy
        if not has_prompt or isinstance(prompt, str) and not is_assistant(chosen[0]) and template is None:
            turns, *completions = split_chats(chosen, rejected)
            return TextExample("", turns=turns, completions=tuple(completions))
    elif not has_prompt and isinstance(chosen, str) and isinstance(rejected, str):
        return split_dialogues(chosen, rejected)
    return _joined(prompt, (chosen, rejected))


def _joined(prompt: str | Chat, responses: tuple[str | Chat, ...]) -> TextExample:
    """Return an example of texts; where the prompt or a response is a chat, of chats."""
    texts = tuple(response for response in responses if isinstance(response, str))
    if isinstance(prompt, str) and len(texts) == len(responses):
        return TextExample(prompt, texts)
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    if responses and is_assistant(turns[-1]):
        raise UserError("the prompt ends with an assistant turn, as if it had its response already")
    completions = tuple((Message("assistant", each),) if isinstance(each, str) else each for each in responses)
    for chat in completions:
        if not is_assistant(chat[0]):
            raise UserError(f"a response must begin with an assistant turn, found {chat[0].role!r}")
    return TextExample("", turns=turns, completions=completions)


def _dialogue_response(response: str) -> Chat:
    """Return the turns of a response in a dialogue as in hh-rlhf, which may go on in it."""
    return dialogue_turns(f"{ASSISTANT}{response}") or (Message("assistant", ""),)


def _response_column(row: Row, form: str) -> str | None:
    """Return the column with a form's response, the first that has a value; None if the row has none."""
    present = [name for name in RESPONSE_COLUMNS[form] if name in row]
    return next((name for name in present if row[name] is not None), present[0] if present else None)


def _text_or_chat_column(row: Row, name: str) -> str | Chat:
    if name not in row:
        raise UserError(missing(row, name))
    return text_or_chat(row[name], name)


def _instruction_prompt(row: Row) -> str:
    _check_unread(row, "history")
    context = text_column(row, "input") if row.get("input") else ""
    template = ALPACA_TEMPLATES["with_input" if context else "without_input"]
    return template.format(instruction=text_column(row, "instruction"), input=context)


PROMPTS: dict[str, Callable[[Row], str | Chat]] = {
    "prompt": lambda row: _text_or_chat_column(row, "prompt"),
    "instruction": _instruction_prompt,
    "question": lambda row: QUESTION_TEMPLATE.format(question=text_column(row, "question")),
    "input": lambda row: _text_or_chat_column(row, "input"),
    "text": lambda _: "",
}
"""Forms whose prompt does not depend on their responses."""
