"""Replies of families of models: content, thoughts and calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from family_replies import ARGUMENTS, CALL, REPLIES, TEXT, THINK, THOUGHTS, TOOLS
from transformers import AutoTokenizer

from flexrlhf.config.environment_settings import EnvironmentSpec, ToolFormat
from flexrlhf.data.chat import ChatFormat
from flexrlhf.data.quickstart.corpus import build_tokenizer
from flexrlhf.data.turn_tokens import TurnTokens
from flexrlhf.environments.call_forms import FORMS, ToolCall, ends_in_thought
from flexrlhf.environments.tool_calls import parse_calls, read_reply
from flexrlhf.environments.tool_schemas import EnvironmentTools
from flexrlhf.errors import UserError

CALLS = [("add", ARGUMENTS), ("add", {})]
FENCE = "<｜tool▁sep｜>a\n```json\n"
EACH = [(form, text) for form, texts in REPLIES.items() for text in texts]


def read(text: str, form: str, is_thinking: bool = False) -> tuple[str, str, list[tuple[str, object]]]:
    content, reasoning, calls = read_reply(text, form, TOOLS, is_thinking)
    return content, reasoning, [(call.name, json.loads(call.arguments)) for call in calls]


def test_every_form_is_a_setting_with_a_reply() -> None:
    assert set(get_args(ToolFormat)) == set(FORMS) == set(REPLIES)


@pytest.mark.parametrize(("form", "text"), EACH)
def test_replies_are_read(form: str, text: str) -> None:
    assert read(text, form) == (TEXT, "", CALLS)
    thought = THOUGHTS.get(form, THINK)
    assert read(thought.format(f" why?\n{text.replace('<|', '<')}") + text, form)[::2] == (TEXT, CALLS)
    assert read(thought.format(" why? ") + text, form)[1].strip() == "why?"
    calls, errors = parse_calls(text, form, {"add": {"b"}})
    assert (calls, errors) == ([ToolCall(name, arguments) for name, arguments in CALLS], [])


@pytest.mark.parametrize(("form", "text"), EACH)
def test_replies_that_are_cut_off_keep_their_text(form: str, text: str) -> None:
    whole = len(read(text, form)[2])
    for end in range(len(text)):
        content, _, calls = read(text[:end], form)
        assert len(calls) <= whole and all(call in CALLS for call in calls)
        # the text of a call that is cut off is content
        assert form == "harmony" or content or calls or not text[:end].strip()
        parse_calls(text[:end], form)


TEMPLATES = {"qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "llama3_1": "llama3"}
"""Forms of chat templates of tests/fixtures."""


@pytest.mark.parametrize(("name", "form"), TEMPLATES.items())
def test_one_form_reads_the_calls_that_a_chat_template_writes(name: str, form: str, tmp_path: Path) -> None:
    """It is the one of ``auto``."""
    build_tokenizer(["a"], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = (Path(__file__).parents[1] / "fixtures/chat_templates" / f"{name}.jinja").read_text()
    assert form_of(tokenizer) == form


def test_a_template_without_calls_has_no_form(tmp_path: Path) -> None:
    build_tokenizer(["a"], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for template in (None, "{% for message in messages %}<{{ message.content }}>{% endfor %}"):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="tool_format: auto is the form .*, and no known form reads them; name the"):
            form_of(tokenizer)
    assert form_of(tokenizer, "llama3") == "llama3"


def form_of(tokenizer: Any, written: str = "auto") -> str:
    settings = EnvironmentSpec(tools=("a.py:b",), tool_format=written)
    return EnvironmentTools(settings).with_known_form(TurnTokens(tokenizer, ChatFormat(), bridge=True)).tool_format


@pytest.mark.parametrize("form", FORMS)
def test_a_text_without_calls_is_content(form: str) -> None:
    for text in ("", " It is 4.\n", 'The {"a": 1} of [1, 2]; <b>x</b> add(1)', "[1, 2]"):
        assert read(text, form) == (text, "", [])


def test_thoughts() -> None:
    assert read("<think>\nWhy?\n</think>\n\nSo.", "hermes") == ("So.", "Why?", [])
    assert read("Why?</think>So.", "hermes") == ("So.", "Why?", [])
    assert read("Why", "hermes", is_thinking=True) == ("", "Why", [])
    assert read("<think>Why", "glm45") == ("", "Why", [])
    assert read("A<think>b</think>C<think>d</think>E", "hermes") == ("ACE", "b\nd", [])
    assert read("<think>b</think>C", "mistral") == ("C", "b", [])
    assert ends_in_thought("<|im_start|>assistant\n<think>\n", "hermes")
    assert not ends_in_thought("<|im_start|>assistant\n<think>\n\n</think>\n\n", "hermes")
    assert ends_in_thought("[INST]x[/INST][THINK]", "mistral") and not ends_in_thought("[THINK]", "hermes")


def test_calls_that_are_none_are_content() -> None:
    bad = f"{TEXT}\n<tool_call>{{'name'</tool_call>"
    assert read(bad, "hermes") == (bad, "", [])
    good = REPLIES["hermes"][0].removeprefix(TEXT)
    assert read(bad + good, "hermes") == (bad, "", CALLS)
    no_number = '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'
    assert read(no_number, "hermes") == (no_number, "", [])
    # halves of surrogate pairs have to stay escapes: no UTF-8 has them
    ((_, _, (call,))) = read_reply('<tool_call>{"name": "add", "arguments": {"b": "\\ud83d"}}</tool_call>', "hermes")
    assert call.arguments == '{"b": "\\ud83d"}'


@pytest.mark.parametrize(
    ("form", "text", "sentence"),
    [
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</function>", "has text that is no argument: <param"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "has no </function> at its end"),
        # repetitions that a policy falls into take no time that grows with their square
        ("qwen3_coder", f"<function=add>{'<parameter=a>' * 50_000}</function>", "has text that is no argument: <param"),
        ("glm45", f"<tool_call>add{'<arg_key>a' * 50_000}</tool_call>", "has text that is no argument: <arg_key>a"),
        ("deepseek_v3", f"<｜tool▁call▁begin｜>{FENCE * 50_000}<｜tool▁call▁end｜>", "is no JSON"),
        ("glm45", "<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "has no name"),
        ("glm45", f"<tool_call>{CALL}</tool_call>", "has no name"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": ', "is no JSON"),
        ("mistral", "[TOOL_CALLS]", "is no JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]", "the arguments of the call of add are no JSON object"),
        ("functiongemma", "<start_function_call>call:add{a:<escape>1}<end_function_call>", "is no JSON"),
        ("pythonic", "[add(1)]", "add(1) is no call with arguments by name"),
        ("pythonic", "[add(a=b)]", "cannot be read (malformed node"),
        ("pythonic", f"[add(a={'(' * 500}", "cannot be read (too many nested parentheses"),
        ("pythonic", "<|tool_call_start|>[]<|tool_call_end|>", "there is no tool call in []"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{'a'", "is no JSON"),
    ],
)
def test_a_form_whose_call_is_none_has_a_sentence(form: str, text: str, sentence: str) -> None:
    calls, (error,) = parse_calls(text, form)
    assert calls == [] and sentence in error and "\n" not in error and len(error) < 500
    assert read(text, form)[::2] == (text, [])


def test_values_without_a_type() -> None:
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in [("b", 5), ("a", "x")])
    text = f"<tool_call>add{pairs}</tool_call>"
    assert read(text, "glm45")[2] == [("add", {"b": "5", "a": "x"})]
    assert parse_calls(text, "glm45")[0] == [ToolCall("add", {"b": 5, "a": "x"})]


def test_an_expression_leaves_its_sentence() -> None:
    text = "<think>How?</think>I will bring a lamp."
    content, reasoning, (call,) = read_reply(text, r"(?P<name>bring|fix) a (?P<thing>\w+)")
    assert (content, reasoning, call.name, json.loads(call.arguments)) == (
        "I will bring a lamp.",
        "How?",
        "bring",
        {"thing": "lamp"},
    )
    assert read("3 + 4 =", r"(?P<a>[\d+ ]+)=")[2] == [("add", {"a": "3 + 4"})]
