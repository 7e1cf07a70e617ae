"""Calls of tools in the text of a turn, and sentences about those that cannot be read."""

from __future__ import annotations

import pytest

from flexrlhf.config.environment_settings import EnvironmentSpec
from flexrlhf.environments.call_forms import ToolCall
from flexrlhf.environments.tool_calls import ONLY, parse_calls

ADD = ToolCall("add", {"a": 1, "b": [2, "é"]})
OWN = r"CALL (?P<name>\w*)(?: (?P<arguments>\{.*?\}|\d+))?\."
SENTENCE = r"(?P<name>bring|fix)(?: you)?(?: a new (?P<thing>\w+)| it)"
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": [2, "é"]}}'


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", HERMES, [ADD]),
        ("hermes", f"I add.\n{HERMES}\n{HERMES}\n", [ADD, ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now")]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [ToolCall("now")]),
        ("hermes", f"<think>{HERMES}</think>done", []),
        ("hermes", f"{HERMES}</think>{HERMES}", [ADD]),
        ("hermes", f"<think>{HERMES}", []),
        ("hermes", LLAMA, []),
        ("hermes", "", []),
        ("llama3", LLAMA, [ADD]),
        ("llama3", f"I add: <|python_tag|>{LLAMA}", [ADD]),
        ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", [ADD, ADD]),
        ("llama3", '\n {"name": "now", "arguments": {"zone": "utc"}} ', [ToolCall("now", {"zone": "utc"})]),
        ("llama3", '{"result": 5}', []),
        ("llama3", f"The call is {LLAMA}", []),
        ("llama3", HERMES, []),
        (OWN, 'CALL add {"a": 1, "b": [2, "é"]}. CALL now.', [ADD, ToolCall("now")]),
        (OWN, "no calls", []),
        (r"(?P<sum>[\d+ ]+)=", "So 3 + 4 =", [ToolCall(ONLY, {"sum": "3 + 4"})]),
        (SENTENCE, "I will bring you a new key, and fix it.", [ToolCall("bring", {"thing": "key"}), ToolCall("fix")]),
    ],
)
def test_calls_are_found(form: str, text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text, form) == (calls, [])


@pytest.mark.parametrize(
    ("form", "text", "sentence"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "is no JSON (Expecting property name"),
        ("hermes", '<tool_call>{"name": "add", "argum', "has no </tool_call> at its end"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "the tool call has no name: {"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "the tool call has no name: {"),
        ("hermes", '<tool_call>["add", 1]</tool_call>', "is no JSON object: ["),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
            "the arguments of the call of add are no",
        ),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "is no JSON (too deep or long): [[["),
        ("hermes", f"<tool_call>{'1' * 10_000}</tool_call>", "is no JSON (too deep or long): 111"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}', "is no JSON (Expecting ',' delimiter"),
        ("llama3", '{"parameters": {}}', "the tool call has no name"),
        ("llama3", '{"name": "add", "parameters": [1]}', "the parameters of the call of add are no JSON object"),
        ("llama3", '<|python_tag|>search.call(query="x")', "is no JSON (Expecting value at character 0): search.call("),
        (OWN, "CALL  {}.", "the tool call has no name: CALL {}."),
        (OWN, "CALL add {1}.", "is no JSON"),
        (OWN, "CALL add 12.", "the arguments of the call of add are no JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_sentence(form: str, text: str, sentence: str) -> None:
    calls, (error,) = parse_calls(text, form)
    assert calls == [] and sentence in error and "\n" not in error and len(error) < 400


def test_a_bad_call_leaves_the_others() -> None:
    calls, errors = parse_calls(f"{HERMES}<tool_call>no</tool_call>{HERMES}<tool_call>{HERMES}", "hermes")
    assert calls == [ADD] * 3 and len(errors) == 2


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("herms", "found 'herms' (did you mean 'hermes'?)"),
        ("CALL (.*)", "a regular expression with groups such as name and arguments, found 'CALL (.*)'"),
        ("CALL (?P<name>", "found 'CALL (?P<name>': missing ), unterminated subpattern at position 5"),
    ],
)
def test_a_form_that_is_none_is_refused(form: str, sentence: str) -> None:
    assert EnvironmentSpec(tools=("a.py:b",), tool_format=OWN).tool_format == OWN
    with pytest.raises(ValueError) as caught:
        EnvironmentSpec(tools=("a.py:b",), tool_format=form)
    assert sentence in str(caught.value)
