"""Responses in rendered chats: the text that a policy sees and samples, and the parts of it that are the assistant's.

Which part of a chat is the assistant's follows from ``{% generation %}`` markers in the template, else from the prefix
rule: the turns before an assistant's turn, with the prompt for generation, render to the beginning of the whole chat,
and so do the turns up to its end. A chat that is rendered in another way is put together from its turns: the prompt,
each of the assistant's turns as it is rendered while it is the last, and the text of the template between two of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix

from flexrlhf.data.chat import ChatTemplate, check_turns
from flexrlhf.data.known_keys import REASONING
from flexrlhf.data.messages import Chat, Message, is_assistant
from flexrlhf.errors import UserError

ResponseSpan = tuple[int, int]
_OPENING = re.compile(r"([<\[])([\w:]*(?:think|thought|reason)\w*)[>\]]\s*$", re.IGNORECASE)
"""A tag by which a prompt opens a thought."""
_CLOSING = re.compile(r"[<\[]/([\w:]*(?:think|thought|reason)\w*)[>\]]", re.IGNORECASE)
_SHOWN = 24
"""Characters of a text that a message shows."""
BY_TURNS = (
    "are put together from their turns, as the chat template writes earlier turns in another way than it has "
    "prompted for them: thoughts stay, as in an episode with environment.bridge"
)
NO_THOUGHT = "have no thought where the prompt for sampling opens one: they begin with an empty thought"


@dataclass(frozen=True)
class RenderedResponse:
    """A chat as text, with the response behind its prompt.

    prompt:   characters of the prompt
    spans:    ranges of characters behind it that are trained on, in order
    remarks:  what a user should know of it, the ends of sentences about rows
    """

    text: str
    prompt: int
    spans: tuple[ResponseSpan, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _OwnTurn:
    """An assistant's turn as its policy would sample it.

    text:    behind the prompt
    spans:   ranges of it that are trained on
    whole:   the chat up to its end, as the template renders it
    remark:  that of the response
    """

    text: str
    spans: tuple[ResponseSpan, ...]
    whole: str
    remark: str = ""


def render_response(
    template: ChatTemplate, turns: Sequence[Message], completion: Sequence[Message]
) -> RenderedResponse:
    """Return ``turns`` and ``completion`` as one text. Raises UserError if the assistant's part cannot be found."""
    check_turns(turns)
    if not any(map(is_assistant, completion)):
        raise UserError("the response has no assistant turn")
    response = _whole(template, turns, completion) or _by_turns(template, tuple(turns), tuple(completion))
    if not response.spans:
        raise UserError("the chat template marks no text of the response with {% generation %}")
    return response


def _whole(template: ChatTemplate, turns: Sequence[Message], completion: Sequence[Message]) -> RenderedResponse | None:
    """Return the chat as the template renders it; None if that is not the prompt for sampling and its responses."""
    messages = (*turns, *completion)
    prompt = template.render(turns, generation=is_assistant(completion[0]))
    text, found = _rendered(template, messages)
    if not text.startswith(prompt) or not _has_thoughts(prompt, text, completion):
        return None
    if found is None:
        spans = list(_prefix_spans(template, text, turns, completion))
    else:
        spans = [
            _with_end(template, text, max(first, len(prompt)), last) for first, last in found if last > len(prompt)
        ]
    return None if None in spans else RenderedResponse(text, len(prompt), tuple(span for span in spans if span))


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, list[ResponseSpan] | None]:
    """Return a chat as text, and the ranges that the template marks; None if it marks none."""
    return template.marked(messages) if template.is_marked else (template.render(messages), None)


def _prefix_spans(
    template: ChatTemplate, text: str, turns: Sequence[Message], completion: Sequence[Message]
) -> Iterator[ResponseSpan | None]:
    """Yield the range of each assistant's turn by the prefix rule; None for one that does not follow it."""
    messages = (*turns, *completion)
    for number in range(len(turns), len(messages)):
        if is_assistant(messages[number]):
            begun, ended = template.render(messages[:number], generation=True), template.render(messages[: number + 1])
            is_prefix = text.startswith(begun) and text.startswith(ended)
            yield _with_end(template, text, len(begun), len(ended)) if is_prefix else None


def _with_end(template: ChatTemplate, text: str, first: int, last: int) -> ResponseSpan:
    """Return the range of a turn's characters up to the end of turns that was set, which may follow it."""
    end = template.end
    if not end or text.startswith(end, last) and not text.endswith(end, first, last):
        return first, last + len(end)
    found = text.rfind(end, first, last)
    return first, last if found < 0 else found + len(end)


def _has_thoughts(prompt: str, text: str, completion: Sequence[Message]) -> bool:
    """Whether a text has all thoughts of a response in order, the first one where the prompt opens a thought."""
    first = _behind_opening(prompt, completion[0]) if is_assistant(completion[0]) else None
    if first is not None and not _squeezed(text[len(prompt) :]).startswith(_squeezed(first)):
        return False
    place, squeezed = 0, _squeezed(text[len(prompt) :]) if any(_thought(each) for each in completion) else ""
    for message in filter(is_assistant, completion):
        thought = _squeezed(_thought(message))
        place = squeezed.find(thought, place)
        if place < 0:
            return False
        place += len(thought)
    return True


def _by_turns(template: ChatTemplate, turns: Chat, completion: Chat) -> RenderedResponse:
    """Return the chat put together from its turns."""
    places = [place for place, message in enumerate(completion) if is_assistant(message)]
    if places[0] != 0:
        raise _changed(len(turns), template)
    spans, remarks = list[ResponseSpan](), list[str]()
    prompt = text = template.render(turns, generation=True)
    for place, following in zip(places, [*places[1:], None], strict=True):
        turn = _turn(template, (*turns, *completion[:place]), completion[place])
        body, kept, behind = turn.text, "", ""
        if following is not None:
            later = (*turns, *completion[:following]), completion[place + 1 : following]
            body, kept, behind = _between(template, turn, *later)
        start, limit = len(text), len(text) + len(body) + len(kept)
        inside = [(start + first, min(start + last, limit)) for first, last in turn.spans if start + first < limit]
        text += body + behind
        spans += [_with_end(template, text, *span) for span in inside]
        remarks += [turn.remark] if turn.remark else []
    whole = _rendered(template, (*turns, *completion[: places[-1] + 1]))[0]
    remarks += [BY_TURNS] if len(places) > 1 and whole != text else []
    return RenderedResponse(text, len(prompt), tuple(spans), tuple(dict.fromkeys(remarks)))


def _between(template: ChatTemplate, turn: _OwnTurn, before: Chat, messages: Chat) -> tuple[str, str, str]:
    """Return a turn without its end, the part of the end that its policy samples, and the text up to the next turn.

    before:    all turns before that one
    messages:  the last of them, behind ``turn``
    """
    prompt, end = template.render(before, generation=True), template.turn_end
    if prompt.startswith(turn.whole):
        return turn.text, "", prompt[len(turn.whole) :]
    behind = template.after_turn(messages)
    if not (prompt.endswith(behind) and turn.text.endswith(end)):
        raise _changed(len(before), template)
    return turn.text.removesuffix(end), _shared(end, behind, template), behind


def _turn(template: ChatTemplate, before: Chat, message: Message) -> _OwnTurn:
    """Return a turn of the assistant behind ``before``, with its end."""
    prompt = template.render(before, generation=True)
    text, found = _rendered(template, (*before, message))
    head = prompt if text.startswith(prompt) else prompt.removesuffix(template.prompt_end)
    content, tail = _behind_opening(prompt, message), text[len(head) :]
    apart = partial(_apart, template, before, prompt, text)
    if content is None and not text.startswith(head):
        raise apart()
    is_kept = _squeezed(_thought(message)) in _squeezed(tail)
    if content is not None:
        is_kept = head == prompt and _squeezed(tail).startswith(_squeezed(content))
    if not is_kept and (content is not None or _CLOSING.search(message.content)):
        # the template leaves out the thought, or writes an empty one in front of it
        if not text.endswith(template.turn_end):
            raise _changed(len(before) + 1, template)
        own = (message.content if content is None else content) + template.turn_end
        return _OwnTurn(own, ((0, len(own)),), text)
    bridged = _bridge(prompt, head, text)
    if bridged is None:
        raise apart()
    front, tail, remark = bridged
    offset = len(text) - len(tail)
    marks = [(offset, len(text))] if found is None else [(max(first, offset), last) for first, last in found]
    moved = [(first - offset + len(front), last - offset + len(front)) for first, last in marks if last > offset]
    if front:
        moved = [(0, last if first == len(front) else first) for first, last in moved[:1]] + moved[1:]
    return _OwnTurn(front + tail, tuple(moved), text, remark)


def _bridge(prompt: str, head: str, text: str) -> tuple[str, str, str] | None:
    """Return the text between a prompt and the rest of a turn, that rest, and a remark; None if there is no such text.

    head:  the prompt without the text by which it ends differently than the turn begins
    """
    gap, tail = prompt[len(head) :], text[len(head) :]
    opening = _OPENING.search(prompt)
    if not gap.strip():
        return "", tail if not gap else tail.lstrip(), ""
    if opening is None or opening.start() < len(head):
        return None
    return ("\n" if prompt.endswith("\n") else "") + _closing(opening) + "\n\n", tail, NO_THOUGHT


def _behind_opening(prompt: str, message: Message) -> str | None:
    """Return a response with a thought as it goes on behind a prompt that opens the thought; None without both."""
    opening, content = _OPENING.search(prompt), message.content
    if opening is None:
        return None
    if thought := message.given.get(REASONING[0]):
        return f"{thought.strip()}\n{_closing(opening)}\n\n{content}"
    if _CLOSING.search(content) is None:
        return None
    tag, rest = opening.group().rstrip(), content.lstrip()
    return rest.removeprefix(tag).lstrip("\n") if rest.startswith(tag) else content


def _closing(opening: re.Match[str]) -> str:
    """Return the tag that ends a thought."""
    return {"<": "</{}>", "[": "[/{}]"}[opening.group(1)].format(opening.group(2))


def _thought(message: Message) -> str:
    """Return the thought in front of a response; empty without one."""
    if thought := message.given.get(REASONING[0]):
        return str(thought)
    closing = _CLOSING.search(message.content)
    if closing is None:
        return ""
    return re.sub(rf"^\s*[<\[]{re.escape(closing.group(1))}[>\]]", "", message.content[: closing.start()])


def _squeezed(text: str) -> str:
    """Return a text without white space, which templates change around thoughts."""
    return "".join(text.split())


def _shared(first: str, second: str, template: ChatTemplate) -> str:
    """Return the beginning that two texts share, without a part of a special token."""
    shared = commonprefix((first, second))
    for text in (first, second):
        for found in template.special_tokens.finditer(text):
            if found.start() < len(shared) < found.end():
                shared = shared[: found.start()]
    return shared


def _apart(template: ChatTemplate, before: Chat, prompt: str, text: str) -> UserError:
    """Return why a response in ``text`` does not follow the ``prompt`` behind the turns ``before``."""
    same, turns = (len(_shared(prompt, other, template)) for other in (text, template.render(before)))
    if same < turns:
        return _changed(len(before), template)
    thinking = ", such as this one behind {% set enable_thinking = true %}" * ("enable_thinking" in template.text)
    return UserError(
        f"the prompt for sampling ends with {_short(prompt[same:])}, where the chat template writes "
        f"{_short(text[same:])} with the response, so the response would be trained on behind another text than it is "
        f"sampled behind: name a template whose prompt the chat begins with in data.chat_template{thinking}"
    )


def _changed(number: int, template: ChatTemplate) -> UserError:
    remedy = "name" if template.is_marked else "mark it with {% generation %} in a template of your own, or name"
    return UserError(
        f"the chat template renders the first {number} turns in another way when others follow, so the text that "
        f"the assistant has written cannot be found: {remedy} a template that keeps turns as they are "
        "(data.chat_template)"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
