"""Chats: lists of messages as the columns of a row contain them.

A message is ``{role, content}`` or, as in ShareGPT's files, ``{from, value}``. Contents are texts, or lists of parts
that are all texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flexrlhf.data.files import json_type
from flexrlhf.data.row_layout import checked_text, keys
from flexrlhf.errors import UserError, nearest, shown

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool")
}
"""Role as a row names it → role of the chat template."""
_TURN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    role:     ``system``, ``user``, ``assistant`` or another one that the chat template takes
    content:  its text
    """

    role: str
    content: str


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
    """Split a chat before its first assistant turn; turns after its last one are left out."""
    turns = [index for index, message in enumerate(chat) if is_assistant(message)]
    if not turns:
        raise UserError(f"{name!r} has no assistant turn, so there is no response")
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
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
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
    if item.get("tool_calls"):
        raise UserError(f"{name} has tool_calls, which are not rendered; give them as text in its {content_key}")
    for key in (role_key, content_key):
        if key not in item:
            raise UserError(f"{name} needs role and content (or from and value), but has the keys {keys(item)}")
    role = checked_text(item[role_key], f"the {role_key} of {name}")
    if role not in ROLES:
        raise UserError(f"{name} has the role {shown(role)}{nearest(role, ROLES)}, which is none of {', '.join(ROLES)}")
    return Message(ROLES[role], _content(item[content_key], f"the {content_key} of {name}"))


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
