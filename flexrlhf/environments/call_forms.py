"""Forms in which families of models write thoughts and calls of tools.

Worker processes load this: the standard library alone. Behind each form the families, and a call:

hermes:         Qwen2.5, Qwen3, SmolLM3, Granite 4: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
qwen3_coder:    Qwen3-Coder, Qwen3.5:
                ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
llama3:         Llama 3: ``{"name": ..., "parameters": {...}}``, several with ``;`` between, also behind
                ``<|python_tag|>``
pythonic:       Llama 4, LFM2, Olmo 3: ``[NAME(KEY=VALUE), ...]``, also inside of ``<|python_start|>``,
                ``<|tool_call_start|>`` or ``<function_calls>``, there in lines
mistral:        Mistral, Ministral, Magistral: ``[TOOL_CALLS]NAME[ARGS]{...}``, or
                ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``
deepseek_v3:    DeepSeek V3, V3.1, R1: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``, or with
                ``function<｜tool▁sep｜>NAME`` in front of JSON in a fence
glm45:          GLM-4.5 to 4.7: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``
kimi_k2:        Kimi K2:
                ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``
functiongemma:  FunctionGemma: ``<start_function_call>call:NAME{KEY:<escape>TEXT<escape>}<end_function_call>``
gemma4:         Gemma 4: ``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>}<tool_call|>``
phi4_mini:      Phi-4-mini: ``functools[{"name": ..., "arguments": {...}}]``, also inside of ``<|tool_call|>``
harmony:        gpt-oss: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}``

A thought is ``<think>...</think>``, of mistral also ``[THINK]...[/THINK]``; of gemma4 it is the channel ``thought``, of
harmony ``analysis``. Calls inside of thoughts are none. Values without a type (qwen3_coder, glm45) are JSON if they can
be, unless their parameter is a text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 200
"""Characters of a call that an error quotes."""


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool: its name, and its arguments by name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class FailedCall(ValueError):
    """Text that begins a call and is none."""


THINK = (("<think>", "</think>"),)
"""Marks around a thought, unless a form has others."""
TextParameters = Mapping[str, Collection[str]]
"""Parameters whose values are texts, by tool."""
CallRead = ToolCall | FailedCall
FoundCalls = tuple[int, int, Sequence[CallRead]]
"""The calls in a range of a text's characters, and its borders."""
_FindCalls = Callable[[str, TextParameters], Iterable[FoundCalls]]
_Reader = Callable[[str, TextParameters], Sequence[CallRead]]
"""Return the calls of the text between the marks of a form."""


@dataclass(frozen=True)
class ReplyParts:
    """Parts of a reply.

    content:    its text without thoughts and calls; with the text of calls that cannot be read
    reasoning:  its thoughts, with line breaks between
    calls:      in order
    """

    content: str
    reasoning: str
    calls: tuple[CallRead, ...] = ()


@dataclass(frozen=True)
class ReplyForm:
    """Form of calls and thoughts.

    find:      the calls of a text without thoughts
    thoughts:  the marks around a thought
    around:    an expression of marks around several calls
    """

    find: _FindCalls
    thoughts: tuple[tuple[str, str], ...] = THINK
    around: str = r"(?!)"

    def parts(self, text: str, is_thinking: bool, parameters: TextParameters) -> ReplyParts:
        """Return the parts of a reply. ``is_thinking``: whether its prompt opens a thought."""
        content, reasoning = split_thoughts(text, self.thoughts, is_thinking)
        found = list(self.find(content, parameters))
        calls = tuple(call for _, _, calls in found for call in calls)
        kept, place = "", 0
        for first, last, each in found:
            if each and not any(isinstance(call, FailedCall) for call in each):
                kept, place = kept + content[place:first], last
        if place:
            kept = re.sub(self.around, "", kept + content[place:]).strip()
        return ReplyParts(kept if place else content, reasoning, calls)


def split_thoughts(text: str, marks: Sequence[tuple[str, str]], is_thinking: bool = False) -> tuple[str, str]:
    """Return the content of a text and its thoughts.

    A thought without an end reaches the text's end; one without a beginning begins with the text.
    marks:        the ones around a thought
    is_thinking:  whether the text begins inside of a thought
    """
    openings = {opening for opening, _ in marks}
    content, thoughts = list[str](), list[str]()
    parts = re.split("(" + "|".join(re.escape(mark) for pair in marks for mark in pair) + ")", text)
    for place, part in enumerate(parts):
        if place % 2 == 0:
            (thoughts if is_thinking else content).append(part)
        elif part in openings:
            is_thinking = True
        elif is_thinking:
            is_thinking = False
        else:
            thoughts += content
            content = []
    if not thoughts:
        return text, ""
    return "".join(content).strip(), "\n".join(each.strip() for each in thoughts if each.strip())


def _between(begin: str, ends: Sequence[str], read: _Reader, is_open: bool = False) -> _FindCalls:
    """Return the finder of calls between marks.

    begin:    an expression of marks in front of a call
    ends:     marks behind it
    is_open:  whether the next call and the end of the text end a call, too
    """
    end = "|".join(map(re.escape, ends)) or r"(?!)"
    pattern = re.compile(rf"(?:{begin})(.*?)({end}|(?=(?!\A)(?:{begin}))|\Z)", re.DOTALL)

    def find(text: str, parameters: TextParameters) -> Iterator[FoundCalls]:
        for found in pattern.finditer(text):
            body, mark = found.groups()
            if mark or is_open:
                calls = read(body, parameters)
            else:
                calls = [FailedCall(f"the tool call has no {ends[0]} at its end: {_quoted(body)}")]
            yield *found.span(), calls

    return find


def _json_call(body: str, _: TextParameters) -> Sequence[CallRead]:
    try:
        return [read_call(json.loads(body), "arguments", body)]
    except (ValueError, RecursionError) as error:
        return [no_json(body, error)]


def _json_calls(body: str, _: TextParameters) -> Sequence[CallRead]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        return [no_json(body, error)]
    return [read_call(value, "arguments", body) for value in (values if isinstance(values, list) else [values])]


def _named_call(name: str, arguments: str, text: str) -> CallRead:
    """Return the call of a tool by its name, with JSON as its arguments."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return no_json(arguments, error)
    return read_call({"name": name.strip(), "arguments": value}, "arguments", text)


def _mistral(body: str, parameters: TextParameters) -> Sequence[CallRead]:
    if body.strip()[:1] in "[{":
        return _json_calls(body, parameters)
    name, arguments = re.split(r"(?:\[CALL_ID\][^[{]*)?(?:\[ARGS\]|(?=\{))|\Z", body, maxsplit=1)
    return [_named_call(name, arguments, body)]


def _deepseek(body: str, _: TextParameters) -> Sequence[CallRead]:
    name, _mark, arguments = body.partition("<｜tool▁sep｜>")
    named, fence, fenced = arguments.partition("\n```json\n")
    if fence:
        name, arguments = named, fenced.rstrip().removesuffix("```")
    return [_named_call(name, arguments, body)]


def _kimi(body: str, _: TextParameters) -> Sequence[CallRead]:
    name, _mark, arguments = body.partition("<|tool_call_argument_begin|>")
    return [_named_call(re.sub(r"^functions\.|:\d+$", "", name.strip()), arguments.strip() or "{}", body)]


def _qwen3_coder(body: str, parameters: TextParameters) -> Sequence[CallRead]:
    name, _, pairs = body.partition(">")
    return [_tagged(name, pairs, r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", parameters)]


def _glm45(body: str, parameters: TextParameters) -> Sequence[CallRead]:
    name, mark, pairs = body.partition("<arg_key>")
    part = r"((?:(?!<arg_key>).)*?)"
    pair = rf"<arg_key>{part}</arg_key>\s*<arg_value>{part}</arg_value>"
    return [_tagged(name, mark + pairs, pair, parameters)]


def _tagged(name: str, text: str, pair: str, parameters: TextParameters) -> CallRead:
    """Return a call whose arguments are pairs of a key and a value between tags."""
    name = name.strip()
    if re.search(r"[\s<{]", name):
        return FailedCall(f"the tool call has no name: {_quoted(name)}")
    if rest := re.sub(pair, "", text, flags=re.DOTALL).strip():
        return FailedCall(f"the call of {name} has text that is no argument: {_quoted(rest)}")
    texts = parameters.get(name, ())
    pairs = ((key.strip(), value) for key, value in re.findall(pair, text, re.DOTALL))
    return read_call(
        {"name": name, "arguments": {key: _value(value, key in texts) for key, value in pairs}}, "arguments", text
    )


def _value(text: str, is_text: bool) -> object:
    if is_text:
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


def _gemma(mark: str) -> _Reader:
    """Return the reader of JSON whose keys have no quotes, and whose texts are between ``mark`` instead."""

    def read(body: str, _: TextParameters) -> Sequence[CallRead]:
        name, brace, rest = body.partition("{")
        parts = (brace + rest).split(mark)
        parts[1::2] = map(json.dumps, parts[1::2])
        parts[::2] = (re.sub(r'([{,]\s*)([^\s"{}\[\],:]+)\s*:', r'\1"\2":', part) for part in parts[::2])
        # its chat template writes it so
        parts[::2] = (re.sub(r"\bNone\b", "null", part) for part in parts[::2])
        return [_named_call(name, "".join(parts), body)]

    return read


def _pythonic(body: str, _: TextParameters) -> Sequence[CallRead]:
    source = body.strip()
    source = source if source.startswith("[") else f"[{','.join(source.splitlines())}]"
    try:
        parsed = ast.parse(source, mode="eval").body
        calls = parsed.elts if isinstance(parsed, ast.List) else []
        return [_python_call(call) for call in calls] or [FailedCall(f"there is no tool call in {_quoted(body)}")]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return [FailedCall(f"the tool call cannot be read ({error}): {_quoted(body)}")]


class _JsonWords(ast.NodeTransformer):
    """Constants in place of the words that JSON has for them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802 (the name of ast)
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _python_call(call: ast.expr) -> CallRead:
    """Return a call in Python. Raises ValueError or TypeError for another expression."""
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError(f"{ast.unparse(call)[:_SHOWN]} is no call with arguments by name")
    arguments = {each.arg: ast.literal_eval(_JsonWords().visit(each.value)) for each in call.keywords}
    return read_call({"name": ast.unparse(call.func), "arguments": json.loads(json.dumps(arguments))}, "arguments", "")


def read_call(value: object, key: str, text: str) -> CallRead:
    """Return a call of its JSON value. ``key``: its usual key of the arguments."""
    if not isinstance(value, dict):
        return FailedCall(f"the tool call is no JSON object: {_quoted(text)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return FailedCall(f"the tool call has no name: {_quoted(text)}")
    given = value.get(key, value.get("arguments" if key == "parameters" else "parameters"))
    arguments = {} if given is None else given
    if not isinstance(arguments, dict):
        return FailedCall(f"the {key} of the call of {name} are no JSON object: {_quoted(text)}")
    return ToolCall(name, arguments)


def no_json(text: str, error: Exception, first: int = 0) -> FailedCall:
    """Return why a text is no call. ``first``: its place in the text that the error is about."""
    reason = (
        f"{error.msg} at character {error.pos - first}"
        if isinstance(error, json.JSONDecodeError)
        else "too deep or long"
    )
    return FailedCall(f"the tool call is no JSON ({reason}): {_quoted(text)}")


def _quoted(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]} ..."


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_BARE = re.compile(r'\s*\{\s*"(name|parameters|arguments)"\s*:')


def _llama3(text: str, _: TextParameters) -> Iterator[FoundCalls]:
    head, tag, _rest = text.partition(_LLAMA_TAG)
    if not tag and not _LLAMA_BARE.match(text):
        return
    decoder, space = json.JSONDecoder(), re.compile(rf"\s*;?\s*(?:{re.escape(_LLAMA_TAG)})?\s*")
    first = len(head) if tag else 0
    # the first call has no separator
    place = re.compile(r"\s*").match(text, first + len(tag)).end()  # type: ignore[union-attr]
    while place < len(text):
        try:
            value, last = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            yield first, len(text), [no_json(text[place:], error, place)]
            return
        yield first, last, [read_call(value, "parameters", text[place:last])]
        first, place = last, space.match(text, last).end()  # type: ignore[union-attr]


_HARMONY_END = re.compile(r"<\|(?:start|end|call|return)\|>")
_HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _harmony(text: str) -> ReplyParts:
    """Return the parts of a reply of gpt-oss: messages to channels, and to functions."""
    content, thoughts, calls = list[str](), list[str](), list[CallRead]()
    for message in _HARMONY_END.split(text):
        header, mark, body = message.partition("<|message|>")
        to, channel = _HARMONY_TO.search(header), header.partition("<|channel|>")[2].split("<")[0].split()[:1]
        call = _named_call(to.group(1), body, message) if mark and to else None
        if call is not None:
            calls.append(call)
        if channel == ["analysis"] and call is None:
            thoughts.append(body)
        elif not isinstance(call, ToolCall) and header.strip() != "assistant":
            content.append(message if call or not mark else body)
    return ReplyParts("".join(content), "\n".join(thoughts), tuple(calls))


_FORMS = {
    "hermes": ReplyForm(_between("<tool_call>", ["</tool_call>"], _json_call)),
    "qwen3_coder": ReplyForm(_between("<function=", ["</function>"], _qwen3_coder), around="</?tool_call>"),
    "llama3": ReplyForm(_llama3),
    "pythonic": ReplyForm(
        _between(
            r"<\|tool_call_start\|>|<\|python_start\|>|<function_calls>|\A\s*(?=\[\s*[\w.]+\()",
            ["<|tool_call_end|>", "<|python_end|>", "</function_calls>"],
            _pythonic,
            is_open=True,
        )
    ),
    "mistral": ReplyForm(
        _between(r"\[TOOL_CALLS\]", [], _mistral, is_open=True), thoughts=(("[THINK]", "[/THINK]"), *THINK)
    ),
    "deepseek_v3": ReplyForm(
        _between("<｜tool▁call▁begin｜>", ["<｜tool▁call▁end｜>"], _deepseek), around="<｜tool▁calls▁(?:begin|end)｜>"
    ),
    "glm45": ReplyForm(_between("<tool_call>", ["</tool_call>"], _glm45)),
    "kimi_k2": ReplyForm(
        _between(r"<\|tool_call_begin\|>", ["<|tool_call_end|>"], _kimi),
        around=r"<\|tool_calls_section_(?:begin|end)\|>",
    ),
    "functiongemma": ReplyForm(_between("<start_function_call>call:", ["<end_function_call>"], _gemma("<escape>"))),
    "gemma4": ReplyForm(
        _between(r"<\|tool_call>call:", ["<tool_call|>"], _gemma('<|"|>')),
        thoughts=(("<|channel>thought\n", "<channel|>"),),
        around=r"<\|tool_response>",
    ),
    "phi4_mini": ReplyForm(_between(r"functools(?=\[)|<\|tool_call\|>", ["<|/tool_call|>"], _json_calls, is_open=True)),
}
FORMS = (*_FORMS, "harmony")
"""Names of the forms."""


def reply_parts(text: str, form: str, is_thinking: bool, parameters: TextParameters) -> ReplyParts | None:
    """Return the parts of a reply; None for a form that is not known.

    is_thinking:  whether its prompt ends inside of a thought
    parameters:   the ones whose values are texts, by tool
    """
    if form == "harmony":
        return _harmony(text)
    return _FORMS[form].parts(text, is_thinking, parameters) if form in _FORMS else None


def ends_in_thought(prompt: str, form: str) -> bool:
    """Whether a prompt opens a thought, so that its reply begins inside of one."""
    return prompt.rstrip().endswith(tuple(opening.rstrip() for opening, _ in marks_of(form)))


def marks_of(form: str) -> tuple[tuple[str, str], ...]:
    """Return the marks around a thought."""
    return _FORMS[form].thoughts if form in _FORMS else THINK
