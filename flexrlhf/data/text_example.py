"""A row of data as text or as a chat, before any token: its prompt, its responses, and what it gives to a template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flexrlhf.data.known_keys import CALLS, RowValues
from flexrlhf.data.messages import Chat, Message, dialogue_turns, is_assistant, is_dialogue
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs

ASSISTANT = "\n\nAssistant:"
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class TextExample:
    """A row as text or as a chat.

    prompt:       the prompt, as the form's template makes it; empty if it is a chat
    responses:    none, one, or (chosen, rejected); none where they are messages
    is_text:      whether the row is of form ``text``, which has no prompt
    turns:        the prompt as a chat
    completions:  the responses as messages, one or several turns each
    columns:      all columns of the row
    values:       values for the chat template
    unread:       names of columns and keys with values that are not read
    is_made:      whether a system prompt has made a chat of a text
    """

    prompt: str
    responses: tuple[str, ...] = ()
    is_text: bool = False
    turns: Chat = ()
    completions: tuple[Chat, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    values: RowValues = RowValues()
    unread: tuple[str, ...] = field(default=(), compare=False)
    is_made: bool = field(default=False, compare=False)

    def first(self, number: int) -> TextExample:
        """Return this example with its first responses alone."""
        return replace(self, responses=self.responses[:number], completions=self.completions[:number])


def joined(prompt: str | Chat, responses: tuple[str | Chat, ...]) -> TextExample:
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


def as_chat(example: TextExample) -> TextExample:
    """Return an example of text as a chat: dialogues as in hh-rlhf by their turns, other prompts as one user turn."""
    if example.turns or example.is_text:
        return example
    read = _dialogue_response if is_dialogue(example.prompt) else lambda text: (Message("assistant", text),)
    completions = tuple(read(response) for response in example.responses)
    return replace(example, prompt="", responses=(), turns=dialogue_turns(example.prompt), completions=completions)


def with_system(example: TextExample, system: str) -> TextExample:
    """Return an example as a chat with a system prompt, unless it has one of its own or is a text of pretraining."""
    chat = as_chat(example)
    if example.is_text or chat.turns and chat.turns[0].role in SYSTEM_ROLES:
        return chat
    return replace(chat, turns=(Message("system", system), *chat.turns), is_made=not example.turns)


def has_prompt(example: TextExample) -> bool:
    """Whether the prompt has a text, in a chat other than its system prompt; a text of pretraining needs none."""
    if example.is_text:
        return True
    turns = as_chat(example).turns
    spoken = [turn for turn in turns if turn.role not in SYSTEM_ROLES] or turns
    return any(is_written(turn.content) or CALLS[0] in turn.given for turn in spoken)


def is_written(text: str) -> bool:
    """Whether a text has a character that can be seen."""
    return any(each.isprintable() and not each.isspace() for each in text)


def marked_turns(example: TextExample, needs: Needs) -> TextExample:
    """Return an example whose response begins and ends with a turn that is trained on: turns before it that are not
    belong to the prompt. Raises UserError where none is trained on, or where such marks have no meaning."""
    marked = any(not turn.is_trained for chat in (example.turns, *example.completions) for turn in chat)
    if not marked:
        return example
    if needs == "prompts":
        return replace(example, unread=(*example.unread, "marks of turns that are not trained on"))
    if needs == "pairs":
        if any(is_assistant(turn) and not turn.is_trained for chat in example.completions for turn in chat):
            raise UserError("a turn of 'chosen' or 'rejected' is marked as not trained on, which pairs do not have")
        return example
    (completion,) = example.completions
    trained = [index for index, turn in enumerate(completion) if turn.is_response]
    if not trained:
        raise UserError("all turns of the assistant are marked as not trained on, so nothing is left to learn")
    first, last = trained[0], trained[-1]
    return replace(example, turns=(*example.turns, *completion[:first]), completions=(completion[first : last + 1],))


def _dialogue_response(response: str) -> Chat:
    """Return the turns of a response in a dialogue as in hh-rlhf, which may go on in it."""
    return dialogue_turns(f"{ASSISTANT}{response}") or (Message("assistant", ""),)
