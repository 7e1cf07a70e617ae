"""Chats: lists of messages as the columns of a row contain them.

A message is ``{role, content}`` or, as in ShareGPT's files, ``{from, value}``. Contents are texts, or lists of parts
that are all texts. Further keys are read as ``known_keys`` has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexrlhf.data.files import json_type
from flexrlhf.data.known_keys import CALLS, PART, REASONING, from_json, read_keys
from flexrlhf.data.row_layout import checked_text, keys
from flexrlhf.errors import UserError, nearest, shown

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "observation": "tool", "function": "tool", "function_call": "assistant"},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
}
"""Role as a row names it → role of the chat template."""
_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    role:        ``system``, ``user``, ``assistant`` or another one that the chat template takes
    content:     its text
    given:       further keys for the template, calls of tools and thoughts under one name each
    is_trained:  whether it may be trained on
    """

    role: str
    content: str
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_trained: bool = True

    @property
    def says(self) -> tuple[object, ...]:
        """Parts that make two messages the same turn."""
        return (self.role, self.content, *(self.given.get(key) for key in (CALLS[0], REASONING[0])))

    @property
    def is_response(self) -> bool:
        """Whether this is a turn of the assistant that may be trained on."""
        return is_assistant(self) and self.is_trained


Chat = tuple[Message, ...]


def read_chat(value: object, name: str) -> Chat:
    """Return the messages of a column. Raises UserError for a value that is no list of them."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise UserError(f"{name!r} must be a list of messages, found {json_type(value)}")
    if not value:
        raise UserError(f"{name!r} has no messages")
    return tuple(_message(item, f"message {number} of {name!r}") for number, item in enumerate(value, start=1))


def text_or_chat(value: object, name: str) -> str | Chat:
    """Return the text or the messages of a column that may have either."""
    return read_chat(value, name) if isinstance(value, list | dict) else checked_text(value, repr(name))


def is_assistant(message: Message) -> bool:
    """Whether a turn is the model's own."""
    return message.role == "assistant"


def first_response(chat: Chat, name: str) -> tuple[Chat, Chat]:
    """Split a chat before its first assistant turn that is trained on; turns after its last one are left out."""
    turns = [index for index, message in enumerate(chat) if message.is_response]
    if not turns:
        marked = " that is trained on" * any(map(is_assistant, chat))
        raise UserError(f"{name!r} has no assistant turn{marked}, so there is no response")
    if turns[0] == 0:
        raise UserError(f"{name!r} begins with an assistant turn, so there is no prompt")
    return chat[: turns[0]], chat[turns[0] : turns[-1] + 1]


def last_prompt(chat: Chat, name: str) -> Chat:
    """Return a chat without its last assistant turn, if it ends with one."""
    if not is_assistant(chat[-1]):
        return chat
    if len(chat) == 1:
        raise UserError(f"{name!r} begins with an assistant turn, so there is no prompt")
    return chat[:-1]


def split_chats(chosen: Chat, rejected: Chat) -> tuple[Chat, Chat, Chat]:
    """Return the prompt that two chats begin with, and the rest of each: an assistant turn first."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common].says == rejected[common].says:
        common += 1
    ends = [end for end in range(1, common + 1) if all(_responds(chat, end) for chat in (chosen, rejected))]
    if not ends:
        raise UserError("'chosen' and 'rejected' share no prompt that an assistant turn follows in both")
    return chosen[: ends[-1]], chosen[ends[-1] :], rejected[ends[-1] :]


def is_dialogue(text: str) -> bool:
    """Whether a text begins with a turn as in hh-rlhf."""
    return _TURN.match(text) is not None


def dialogue_turns(text: str) -> Chat:
    """Return the turns of a text as in hh-rlhf; any other text is one user turn."""
    if not is_dialogue(text):
        return (Message("user", text),)
    pieces = _TURN.split(text)
    roles, contents = pieces[1::2], pieces[2::2]
    turns = [
        Message("user" if role == "Human" else "assistant", content.strip())
        for role, content in zip(roles, contents, strict=True)
    ]
    # the prompt ends with the name of the one whose turn it is
    return tuple(turns[:-1] if is_assistant(turns[-1]) and not turns[-1].content else turns)


def _responds(chat: Chat, end: int) -> bool:
    return end < len(chat) and is_assistant(chat[end]) and not is_assistant(chat[end - 1])


def _message(item: object, name: str) -> Message:
    if not isinstance(item, dict):
        raise UserError(f"{name} must be an object, found {json_type(item)}")
    role_key, content_key = ("from", "value") if item.get("from") is not None else ("role", "content")
    for key in (role_key, content_key):
        if key not in item and not (key == content_key and any(item.get(each) for each in CALLS)):
            raise UserError(f"{name} needs role and content (or from and value), but has the keys {keys(item)}")
    if item.get("content") is not None and item.get("value") is not None:
        raise UserError(f"{name} has both content and value; remove one")
    named = checked_text(item[role_key], f"the {role_key} of {name}")
    if named not in ROLES:
        known = nearest(named, ROLES)
        raise UserError(f"{name} has the role {shown(named)}{known}, which is none of {', '.join(ROLES)}")
    content = item.get(content_key)
    others = _others(item, content if isinstance(content, list) else [], name)
    if named == "function_call":
        others, content = others | {CALLS[1]: from_json(content, f"the {content_key} of {name}")}, None
    given, is_trained = read_keys(others, name, ROLES[named])
    if content is None and CALLS[0] in given:
        # templates distinguish a turn without content from one with an empty text
        return Message(ROLES[named], "", given | {"content": None}, is_trained)
    return Message(ROLES[named], _content(content, f"the {content_key} of {name}"), given, is_trained)


def _others(item: Mapping[str, Any], parts: list[Any], name: str) -> dict[str, Any]:
    """Return the keys with values of a message, and of the parts of its content, that are neither role nor content."""
    own, objects = ("role", "content", "from", "value"), [part for part in parts if isinstance(part, dict)]
    of_parts = {PART + key: value for part in objects for key, value in part.items() if key not in ("type", "text")}
    found = {key: value for key, value in item.items() if key not in own} | of_parts
    return {checked_text(key, f"a key of {name}"): value for key, value in found.items() if value is not None}


def _content(value: object, name: str) -> str:
    """Return the text of a message; parts of a list are joined."""
    if not isinstance(value, list):
        return checked_text(value, name)
    return "".join(_part(part, name) for part in value)


def _part(part: object, name: str) -> str:
    if isinstance(part, str):
        return checked_text(part, name)
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise UserError(f"{name} has a part that is no text ({shown(kind) if kind else json_type(part)})")
    return checked_text(part.get("text"), name)
