"""Preference pairs: the prompt of a row with two responses, which its other columns say, or the two share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os.path import commonprefix

from flexrlhf.data.files import Row
from flexrlhf.data.known_keys import EMPTY
from flexrlhf.data.messages import Chat, is_assistant, is_dialogue, read_chat, split_chats, text_or_chat
from flexrlhf.data.row_layout import missing
from flexrlhf.data.text_example import ASSISTANT, TextExample, joined
from flexrlhf.errors import UserError

PAIR = ("chosen", "rejected")
PROMPT_COLUMNS = ("prompt", "messages", "instruction", "question", "query", "problem", "input", "context")
"""Columns that may have the prompt of a pair; next to others the first one has it."""
INSTRUCTION = ("instruction", "input")
"""Columns that make a prompt together."""
Prompts = Mapping[str, Callable[[Row], str | Chat]]
"""Column of a form's prompt → the prompt that the form makes of a row."""


def is_pair(row: Row) -> bool:
    """Whether a row has two responses."""
    return all(row.get(name) is not None for name in PAIR)


def prompt_columns(row: Row) -> tuple[str, ...]:
    """Return the columns that may have the prompt of a pair; none if it has none of its own."""
    found = tuple(name for name in PROMPT_COLUMNS if row.get(name) not in EMPTY)
    return found[:1] if "prompt" in found else found


def text_of_pair(row: Row, template: str | None, prompts: Prompts) -> TextExample:
    """Return the prompt and the responses of a row.

    template:  the prompt that ``data.template`` makes; None without one
    prompts:   of forms whose prompt is not their column's text
    """
    chosen, rejected = (_response(row, name) for name in PAIR)
    if not isinstance(chosen, str) and not isinstance(rejected, str):
        # lists that begin with the user's turn contain the prompt, of which a column of text is a copy
        is_whole = not is_assistant(chosen[0]) and template is None and not isinstance(row.get("prompt"), list | dict)
        if is_whole or template is None and not prompt_columns(row):
            turns, *completions = split_chats(chosen, rejected)
            return TextExample("", turns=turns, completions=tuple(completions))
    elif not isinstance(chosen, str) or not isinstance(rejected, str):
        raise UserError("'chosen' and 'rejected' must be two strings or two lists of messages, found one of each")
    elif template is None and (not row.get("prompt") or _repeats_dialogue(row["prompt"], chosen, rejected)):
        shared = split_dialogues(chosen, rejected)
        if shared.prompt and is_dialogue(shared.prompt) or not prompt_columns(row):
            return shared
    return joined(_prompt(row, prompts) if template is None else template, (chosen, rejected))


def split_dialogues(chosen: str, rejected: str) -> TextExample:
    """Split two dialogues after the last ``"\\n\\nAssistant:"`` up to which they agree.

    The responses keep their leading space. Texts without such a place are two responses to an empty prompt.
    """
    common = commonprefix([chosen, rejected])
    turn = common.rfind(ASSISTANT)
    end = turn + len(ASSISTANT) if turn >= 0 else 0
    return TextExample(chosen[:end], (chosen[end:], rejected[end:]))


def _repeats_dialogue(prompt: object, chosen: str, rejected: str) -> bool:
    """Whether two responses begin with the dialogue in the column of the prompt."""
    return isinstance(prompt, str) and is_dialogue(prompt) and chosen.startswith(prompt) and rejected.startswith(prompt)


def _prompt(row: Row, prompts: Prompts) -> str | Chat:
    name, *others = prompt_columns(row)
    if others and {name, *others} != set(INSTRUCTION):
        found = ", ".join(map(repr, (name, *others)))
        raise UserError(
            f"each of {found} may be the prompt: name one as in data.columns={{prompt: {name}}}, or make one of "
            f"them by data.template"
        )
    if name in prompts:
        return prompts[name](row)
    return read_chat(row[name], name) if name == "messages" else text_or_chat(row[name], name)


def _response(row: Row, name: str) -> str | Chat:
    if name not in row:
        raise UserError(missing(row, name))
    return text_or_chat(row[name], name)
