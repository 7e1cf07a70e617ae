"""Token ids around the replies of an environment: tokens that the policy has sampled are never tokenised again.

The prompt of the next turn is all ids so far, and the ids of the text that the chat template puts behind a turn: the
rest of its end, the replies, and the beginning of the assistant's next turn. That text is rendered behind a short chat,
so it is the template's own for the whole chat only if later turns leave earlier ones as they are, which is checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from os.path import commonprefix
from typing import Any

from flexrlhf.config.data_settings import ControlUse
from flexrlhf.data.chat import ChatFormat, ChatTemplate, Tool, encode_with_cuts
from flexrlhf.data.control_tokens import ControlTokens
from flexrlhf.data.encoding import bos_in_front
from flexrlhf.data.examples import Example, TokenLimits, truncated
from flexrlhf.data.known_keys import CALLS
from flexrlhf.data.messages import Chat, Message, read_chat
from flexrlhf.data.text_example import TextExample
from flexrlhf.errors import UserError

Replies = Sequence[tuple[str, str]]
"""Roles and contents of messages; role "": a text, which in a chat is a turn of the user."""
ReadReset = Callable[[Example, Sequence[int]], Replies | None]
ReadReply = Callable[[Sequence[int]], Replies]
"""Messages of the tokens of a reply."""
_CACHED = 256
"""Replies whose ids are kept: environments repeat short ones."""
_CONTENT = "qzcontentqz"
"""Content by which the template's text around a message is found."""
EXAMPLE = ("probe", {"number": 1, "text": "a: b", "list": [2, {"key": "c"}]})
"""Name and arguments of a tool, by a call of which the form of calls is found."""
ROLES = ("tool", "user")
"""Roles of messages that are read out of a reply."""
_BEFORE = "x"
"""Text in front of a turn's end: some tokenizers write a space before a text."""


class TurnTokens:
    """Token ids around an environment's replies.

    Raises UserError if the chat template renders earlier turns in another way once others follow, unless they are
    bridged. Control tokens of the tokenizer in the texts of an environment are text.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat: ChatFormat,
        bridge: bool = False,
        limits: TokenLimits | None = None,
        is_of_calls: bool = False,
    ) -> None:
        """
        bridge:  whether a template that changes earlier turns is taken, too.
        limits:  of prompts; None: there are none.
        is_of_calls: whether messages are of a program, whose keys a template may need: it is checked by the first ones.
        """
        self._tokenizer, self._chat, self._controls, self._limits = tokenizer, chat, ControlTokens(tokenizer), limits
        self._is_bridged, self._checked = bridge, set[str]()
        self._template = None if chat.use == "never" else ChatTemplate.of(tokenizer, chat, chat.tools)
        self._end = () if self._template is None else self._special_end(self._template.turn_end)
        if self._template is not None and not is_of_calls:
            self._check(Message("tool" if chat.tools else "user", ""))
        self._cached_reply = lru_cache(_CACHED)(self._chat_reply)
        self._with_tools = lru_cache(_CACHED)(self._made_with_tools)
        self._around = lru_cache(self._text_around)

    def prompt(self, example: Example, replies: Replies) -> tuple[int, ...]:
        """Return the prompt of a row with the messages of ``reset`` behind it, truncated as the data's are.

        Raises UserError if it is too long and is not to be truncated.
        """
        return self._bounded(self._prompt(example, replies))

    def of_tools(self, tools: Sequence[Tool]) -> TurnTokens:
        """Return the same with tools that the template writes. Raises UserError as the class."""
        return self._with_tools(json.dumps(tools)) if tools else self

    def text_prompt(self, text: str) -> tuple[int, ...]:
        """Return a prompt that is a text. Raises UserError as ``prompt``."""
        return self._bounded((*bos_in_front(self._tokenizer), *self._plain([("", text)])))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return a prompt that is a whole chat, whose control tokens are text. Raises UserError as ``prompt``, and for
        messages that the template does not take."""
        if self._template is None:
            raise UserError(
                "the tokenizer has no chat template, which a call of /v1/chat/completions needs; name one in "
                "data.chat_template, or call /v1/completions"
            )
        return self._bounded(self._rendered(read_chat(list(messages), "messages"), (), "text"))

    def chat_reply(
        self, messages: Sequence[Mapping[str, Any]], is_ended: bool, end: int | None = None
    ) -> tuple[int, ...]:
        """Return the ids between a turn and the next one, as ``reply``, of messages with all of their keys."""
        row = self._controls.mark_row(TextExample("", turns=read_chat(list(messages), "messages")), "text")
        return self._cached_reply(row.turns, is_ended, end)

    def _bounded(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        if self._limits is None or len(ids) <= self._limits.max_prompt:
            return ids
        if self._limits.drops:
            raise UserError(
                f"the prompt has {len(ids)} tokens with the messages of reset, more than data.max_prompt_tokens "
                f"{self._limits.max_prompt}; use at least {len(ids)}, or data.long_prompts=truncate-left"
            )
        bos = next(iter(bos_in_front(self._tokenizer)), None)
        return truncated(ids, self._limits.max_prompt, self._limits.long_prompts == "truncate-left", bos)

    def _prompt(self, example: Example, replies: Replies) -> tuple[int, ...]:
        if self._template is None or not example.turns:
            return (*example.prompt, *self._plain(replies))
        return self._rendered(example.turns, replies, self._chat.control)

    def _rendered(self, turns: Chat, replies: Replies, control: ControlUse) -> tuple[int, ...]:
        assert self._template is not None, "a chat has a template"
        row = self._controls.mark_row(TextExample("", turns=turns), control)
        text = self._template.prompt((*row.turns, *self._messages(replies)), is_bounded=False)
        return tuple(self._controls.encode(text))

    def _made_with_tools(self, tools: str) -> TurnTokens:
        chat = replace(self._chat, tools=tuple(json.loads(tools)))
        return TurnTokens(self._tokenizer, chat, self._is_bridged, self._limits, is_of_calls=True)

    def written_call(self) -> str:
        """Return a turn that calls EXAMPLE, as the chat template writes it, without its end; empty without a template.

        Raises UserError for a template that refuses calls.
        """
        if self._template is None:
            return ""
        name, arguments = EXAMPLE
        call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
        turns = Message("user", _CONTENT), Message("assistant", _CONTENT, {CALLS[0]: [call]})
        begun, whole = self._template.render(turns[:1], generation=True), self._template.render(turns)
        return whole[len(commonprefix((begun, whole))) :].removesuffix(self._template.turn_end)

    def reset_messages(self, example: Example, ids: Sequence[int]) -> Replies | None:
        """Return the messages of ``reset`` in the prompt ``ids``, as ``prompt`` has returned it.

        None if they cannot be read: the prompt was truncated, or another template renders the chat with them. Those of
        a text have role "".
        """
        if tuple(ids) == example.prompt:
            return ()
        if self._template is None or not example.turns:
            number = len(example.prompt)
            is_whole = tuple(ids[:number]) == example.prompt
            return (("", self._tokenizer.decode(ids[number:], skip_special_tokens=True)),) if is_whole else None
        text, heads = self._tokenizer.decode(ids), dict[str, str]()
        for role in ROLES:
            try:
                begun = self._tokenizer.decode(self._prompt(example, [(role, _CONTENT)]))
            except UserError:
                continue
            head, found, _ = begun.partition(_CONTENT)
            if found and text.startswith(head):
                heads[head] = role
        # behind its first message a reset is written as any reply
        head = max(heads, key=len, default="")
        return self._read_behind(heads[head], text[len(head) :]) if heads else None

    def reply(self, messages: Replies, is_ended: bool, is_chat: bool = True, end: int | None = None) -> tuple[int, ...]:
        """Return the ids between a turn that was sampled and the next one.

        is_ended:  whether the turn's last token is one that ends it; else the whole end is written.
        is_chat:   whether the row is a chat; a text goes on with the texts of ``messages``. So does every row of a
                   tokenizer without a chat template.
        end:       the token that ended the turn; in some templates the next turn begins with it
        """
        if self._template is None or not is_chat:
            return self._plain(messages)
        return self._cached_reply(self._messages(messages), is_ended, end)

    def messages(self, ids: Sequence[int]) -> Replies:
        """Return the messages of ``ids``, as ``reply`` has returned them: without the template's text around them.

        A text that no template has written has role "".
        """
        found = None if self._template is None else self._read(self._tokenizer.decode(ids))
        return (("", self._tokenizer.decode(ids, skip_special_tokens=True)),) if found is None else found

    def _read(self, text: str) -> Replies | None:
        """Return the messages of a text that the template has written behind a turn; None of another one."""
        around = self._around()
        if any(text == parts[0] for (roles, _), parts in around.items() if not roles):
            return ()
        heads = ((parts[0], roles[0]) for (roles, _), parts in around.items() if roles and text.startswith(parts[0]))
        head, role = max(heads, default=("", ""))
        return self._read_behind(role, text[len(head) :]) if role else None

    def _read_behind(self, role: str, rest: str) -> Replies | None:
        """Return the messages of a text behind the beginning of a turn of ``role``; None if the template has not
        written its end."""
        around, messages = self._around(), list[tuple[str, str]]()
        while True:
            found = [
                (rest.find(parts[1]), -len(parts[1]), parts[1], roles[1])
                for (roles, _), parts in around.items()
                if len(roles) == 2 and roles[0] == role and parts[1] in rest
            ]
            if not found:
                parts = around.get(((role,), "rest"))
                # of a role that no turn of the assistant may be in front of, nothing is known
                if parts is None or not rest.endswith(parts[1]):
                    return None
                return (*messages, (role, rest.removesuffix(parts[1])))
            _, _, between, later = min(found)
            content, _, rest = rest.partition(between)
            messages.append((role, content))
            role = later

    def _text_around(self) -> dict[tuple[tuple[str, ...], str], list[str]]:
        """Return the template's text around no message, one and two, by their roles and what is written of the
        end of the turn before: all, the rest, or no token that the next turn begins with.

        It is that of the ids: some tokenizers decode no space in front of a text.
        """
        roles = [each for count in (0, 1, 2) for each in product(ROLES, repeat=count)]
        found = {(each, written): parts for each in roles for written, parts in self._parts(each).items()}
        return {key: parts for key, parts in found.items() if len(parts) == len(key[0]) + 1}

    def _parts(self, roles: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the text around messages of ``roles``, by what is written of the end of the turn before; none if the
        template refuses them."""
        messages = self._messages([(role, _CONTENT) for role in roles])
        try:
            rest, whole = (self._chat_reply(messages, is_ended) for is_ended in (True, False))
        except UserError:
            return {}
        texts = {"rest": rest, "all": whole}
        if rest and rest[0] in self._tokenizer.added_tokens_decoder:
            texts["none"] = rest[1:]
        return {written: str(self._tokenizer.decode(ids)).split(_CONTENT) for written, ids in texts.items()}

    def _chat_reply(self, messages: Chat, is_ended: bool, end: int | None = None) -> tuple[int, ...]:
        assert self._template is not None, "a chat has a template"
        for message in messages:
            self._check(message)
        ids = self._encode_behind(self._template.after_turn(messages))
        # the end that was sampled stands for the template's
        ends = (self._end, (self._tokenizer.eos_token_id,), (end,)) if is_ended else ()
        return ids[next((len(end) for end in ends if end and ids[: len(end)] == end), 0) :]

    def _check(self, message: Message) -> None:
        """Check once for each role that the template writes such a turn, and leaves the turns before it as they are."""
        assert self._template is not None, "a chat has a template"
        if message.role in self._checked:
            return
        self._template.check_reply(message.role, message.given)
        if not self._is_bridged:
            self._template.check_turns_stay(message.role, message.given)
        self._checked.add(message.role)

    def _special_end(self, text: str) -> tuple[int, ...]:
        """Return the ids of a turn's end up to its first special token; none without one."""
        ids = self._encode_behind(text)
        special = [place for place, token in enumerate(ids) if token in self._tokenizer.added_tokens_decoder]
        return ids[: special[0] + 1] if special else ()

    def _encode_behind(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text that follows another one."""
        ids, (start,) = encode_with_cuts(_BEFORE + text, [len(_BEFORE)], self._controls.encode)
        return tuple(ids[start:])

    def _messages(self, messages: Replies) -> Chat:
        """Return messages, marked; a text without characters is none."""
        written = [(role or "user", _whole(content)) for role, content in messages if role or content]
        return tuple(Message(role, self._controls.mark(content)) for role, content in written)

    def _plain(self, messages: Replies) -> tuple[int, ...]:
        return tuple(self._controls.encode(self._controls.mark(_whole("".join(content for _, content in messages)))))


def _whole(text: str) -> str:
    """Return a text with halves of surrogate pairs, which no tokenizer reads, replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
