"""Keys and columns of other tools: read, given to the chat template or named, and rendered as by transformers."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from test_data import WordTokenizer
from test_forms import REPLY, TURN, system, user

from benchmarks.peers.chat_tokenizers import TOOL_FAMILIES, build_chat_tokenizer
from flexrlhf.data.chat import DEFAULT_CHAT, ChatFormat
from flexrlhf.data.encoding import RowEncoder
from flexrlhf.data.examples import Example
from flexrlhf.data.forms import detect_form, needed_text
from flexrlhf.data.known_keys import FLAGS, SYSTEM, RowValues
from flexrlhf.data.messages import Message
from flexrlhf.data.retokenized import TextEncoder
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.data.text_rows import TextRows
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Needs


@pytest.mark.parametrize("key", FLAGS)
def test_turns_that_are_not_trained_on_are_context(key: str) -> None:
    """Before the first turn that is trained on they belong to the prompt, behind the last one they have no effect."""
    turns = [TURN, REPLY | {key: 0}, TURN, REPLY, TURN, REPLY | {key: False}, TURN, REPLY | {key: 1}, REPLY | {key: 0}]
    example = needed_text({"messages": turns}, "messages", "responses")
    assert [turn.role for turn in example.turns] == ["user", "assistant", "user"]
    (completion,) = example.completions
    assert [turn.is_trained for turn in completion] == [True, True, False, True, True]
    text = needed_text({"prompt": [TURN], "completion": turns[1:]}, "prompt", "responses")
    assert (text.turns, text.completions) == (example.turns, example.completions)
    assert needed_text({"messages": turns}, "messages", "prompts").unread == ("marks of turns that are not trained on",)


@pytest.mark.parametrize("name", SYSTEM)
def test_a_system_prompt_of_a_column_makes_a_chat_of_a_text(name: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "response": "a"},
        {"question": "p", "answer": "a"},
        {"instruction": "p", "output": "a"},
        {"input": "p", "output": "a"},
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"messages": [TURN, REPLY]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ]
    for row in rows:
        example = needed_text(row | {name: "Be kind."}, detect_form(row, "responses"), "responses")
        assert [turn.role for turn in example.turns] == ["system", "user"] and example.turns[0] == system("Be kind.")
        assert not example.unread
    templated = needed_text(rows[0] | {name: "Be kind."}, "prompt", "responses", RowLayout(template=f"{{{name}}}: x"))
    assert templated.prompt == "Be kind.: x"


def test_all_texts_of_a_file_are_chats_if_one_has_a_system_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "p", "system": "Be kind."}, {"prompt": "q", "system": ""}]))
    assert [text.turns for text in TextRows.usable(path, needs="prompts")] == [
        (system("Be kind."), user("p")),
        (user("q"),),
    ]


def test_tools_and_variables_of_templates_are_read_in_every_form() -> None:
    tool = {"name": "f", "parameters": {}}
    chats: list[dict[str, Any]] = [
        {"messages": [TURN, REPLY]},
        {"conversations": [TURN, REPLY]},
        {"prompt": [TURN], "completion": [REPLY]},
        {"input": [TURN], "output": "a"},
        {"prompt": [TURN], "chosen": "a", "rejected": "b"},
    ]
    further = {"chat_template_kwargs": {"thinking": True, "x": None}, "documents": [{"text": "d"}], "tools": [tool]}
    expected = RowValues((tool,), {"thinking": True, "documents": [{"text": "d"}]})
    for row in chats:
        for needs in ("responses", "prompts"):
            example = needed_text(row | further, detect_form(row, needs), needs)  # type: ignore[arg-type]
            assert example.values == expected and not example.unread
        assert needed_text(row | {"tools": json.dumps([tool])}, detect_form(row), "prompts").values.tools == (tool,)
        old = needed_text(row | {"functions": [tool]}, detect_form(row), "prompts")
        assert old.values.tools == ({"type": "function", "function": tool},)
        with pytest.raises(UserError, match="which an environment's turns do not have"):
            needed_text(row | further, detect_form(row), "prompts", RowLayout(is_episode=True))
        of_environment = row | {"documents": ["d"], "history": ["h"]}
        assert not needed_text(of_environment, detect_form(row), "prompts", RowLayout(is_episode=True)).values


def test_columns_without_a_meaning_are_named() -> None:
    row = {"prompt": "p", "response": "a", "completion": None, "source": "web", "level": 3, "images": [], "tools": ""}
    assert needed_text(row, "prompt", "responses").unread == ("column 'source'", "column 'level'")
    layout = RowLayout({"answer": "source"}, template="{prompt} {level}")
    assert needed_text(row | {"images": None}, "prompt", "responses", layout).unread == ()


def test_calls_are_read_as_openai_and_llama_factory_have_them() -> None:
    call: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    as_text = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    forms: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [as_text]},
        {"role": "assistant", "tool_calls": json.dumps([call])},
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "assistant", "content": None, "tool_calls": [call["function"]]},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
    ]
    for turn in forms:
        (message,) = needed_text({"messages": [TURN, turn]}, "messages", "responses").completions[0]
        assert (message.role, message.content, message.given["tool_calls"]) == ("assistant", "", [call]), turn
    replies = [{"from": "observation", "value": "r"}, {"role": "function", "name": "f", "content": "r"}]
    for reply in replies:
        assert needed_text({"messages": [TURN, forms[0], reply]}, "messages", "prompts").turns[-1].role == "tool"


# --- what is rendered, against transformers' own rendering


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tokenizers whose chat templates write tools; one of them takes arguments of calls as texts alone."""
    found = {name: build_chat_tokenizer(name, tmp_path_factory.mktemp(name)) for name in TOOL_FAMILIES}
    found["texts"] = build_chat_tokenizer("qwen2_5", tmp_path_factory.mktemp("texts"))
    found["texts"].chat_template = TEXT_ARGUMENTS
    return found


TEXT_ARGUMENTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name + ': ' + call.function.arguments }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Rome", "days": 2}}}
CALLED = CALL["function"] | {"arguments": '{"town": "Rome", "days": 2}'}  # type: ignore[operator]
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a town", "parameters": {}}}
THOUGHT = REPLY | {"reasoning_content": "A greeting."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather", "content": "Rain."}
WROTE = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome", "days": 2}}\n</tool_call><|im_end|>\n'
HELLO = "Hello<|im_end|>\n"
SYSTEM_TURN = {"role": "system", "content": "Be kind."}
OFF = {"enable_thinking": False}
Rendered = tuple[str, dict[str, Any], Needs, list[dict[str, Any]], dict[str, Any], list[str]]
RENDERED: list[Rendered] = [
    # template, row, needs, messages and values that transformers renders, texts that are trained on
    ("qwen2_5", {"messages": [TURN, REPLY]}, "responses", [TURN, REPLY], {}, [HELLO]),
    ("qwen2_5", {"messages": [SYSTEM_TURN, TURN, REPLY]}, "responses", [SYSTEM_TURN, TURN, REPLY], {}, [HELLO]),
    (
        "qwen2_5",
        {"messages": [TURN, REPLY], "system": "Be kind."},
        "responses",
        [SYSTEM_TURN, TURN, REPLY],
        {},
        [HELLO],
    ),
    (
        "qwen2_5",
        {"prompt": "Hi", "response": "Hello", "system": "Be kind."},
        "responses",
        [SYSTEM_TURN, TURN, REPLY],
        {},
        [HELLO],
    ),
    ("qwen2_5", {"prompt": [TURN], "completion": [REPLY]}, "responses", [TURN, REPLY], {}, [HELLO]),
    ("qwen2_5", {"prompt": [TURN], "response": "Hello"}, "responses", [TURN, REPLY], {}, [HELLO]),
    ("qwen2_5", {"input": [TURN], "output": "Hello"}, "responses", [TURN, REPLY], {}, [HELLO]),
    ("qwen2_5", {"prompt": [TURN], "chosen": "Hello", "rejected": "No"}, "responses", [TURN, REPLY], {}, [HELLO]),
    ("qwen2_5", {"context": [TURN], "chosen": [REPLY], "rejected": [REPLY]}, "responses", [TURN, REPLY], {}, [HELLO]),
    (
        "qwen2_5",
        {"question": "Hi", "chosen": [TURN, REPLY], "rejected": [TURN, THOUGHT]},
        "responses",
        [TURN, REPLY],
        {},
        [HELLO],
    ),
    (
        "qwen2_5",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        "responses",
        [TURN, REPLY],
        {},
        [HELLO],
    ),
    ("qwen2_5", {"messages": [TURN, REPLY, TURN, REPLY]}, "responses", [TURN, REPLY, TURN, REPLY], {}, [HELLO, HELLO]),
    (
        "qwen2_5",
        {"messages": [TURN, REPLY | {"weight": 0}, TURN, REPLY]},
        "responses",
        [TURN, REPLY, TURN, REPLY],
        {},
        [HELLO],
    ),
    (
        "qwen2_5",
        {"messages": [TURN, REPLY, TURN, REPLY | {"loss": False}, TURN, REPLY]},
        "responses",
        [TURN, REPLY] * 3,
        {},
        [HELLO, HELLO],
    ),
    ("qwen2_5", {"messages": [TURN, REPLY], "tools": [TOOL]}, "responses", [TURN, REPLY], {"tools": [TOOL]}, [HELLO]),
    (
        "qwen2_5",
        {"prompt": [TURN], "completion": [REPLY], "tools": json.dumps([TOOL])},
        "responses",
        [TURN, REPLY],
        {"tools": [TOOL]},
        [HELLO],
    ),
    ("qwen2_5", {"prompt": [TURN], "functions": [TOOL["function"]]}, "prompts", [TURN], {"tools": [TOOL]}, []),
    (
        "qwen2_5",
        {"prompt": [TURN], "chosen": "Hello", "rejected": "No", "tools": [TOOL]},
        "responses",
        [TURN, REPLY],
        {"tools": [TOOL]},
        [HELLO],
    ),
    (
        "qwen2_5",
        {"messages": [TURN, CALLING, RESULT, REPLY], "tools": [TOOL]},
        "responses",
        [TURN, CALLING, RESULT, REPLY],
        {"tools": [TOOL]},
        [WROTE, HELLO],
    ),
    (
        "qwen2_5",
        {"messages": [TURN, CALLING | {"tool_calls": [{"function": CALLED}]}]},
        "responses",
        [TURN, CALLING],
        {},
        [WROTE],
    ),
    (
        "qwen2_5",
        {"messages": [TURN, {"role": "assistant", "content": None, "function_call": CALLED}]},
        "responses",
        [TURN, CALLING],
        {},
        [WROTE],
    ),
    (
        "qwen2_5",
        {"messages": [TURN, CALLING | {"content": "Wait."}, RESULT]},
        "prompts",
        [TURN, CALLING | {"content": "Wait."}, RESULT],
        {},
        [],
    ),
    (
        "qwen3",
        {"messages": [TURN, THOUGHT]},
        "responses",
        [TURN, THOUGHT],
        {},
        [f"<think>\nA greeting.\n</think>\n\n{HELLO}"],
    ),
    (
        "qwen3",
        {"messages": [TURN, REPLY | {"thinking": "A greeting."}]},
        "responses",
        [TURN, THOUGHT],
        {},
        [f"<think>\nA greeting.\n</think>\n\n{HELLO}"],
    ),
    (
        "qwen3",
        {"prompt": [TURN], "chosen": [THOUGHT], "rejected": [REPLY]},
        "responses",
        [TURN, THOUGHT],
        {},
        [f"<think>\nA greeting.\n</think>\n\n{HELLO}"],
    ),
    ("qwen3", {"messages": [TURN, REPLY, TURN], "chat_template_kwargs": OFF}, "prompts", [TURN, REPLY, TURN], OFF, []),
    (
        "qwen3",
        {"prompt": "Hi", "system_prompt": "Be kind.", "chat_template_kwargs": json.dumps(OFF)},
        "prompts",
        [SYSTEM_TURN, TURN],
        OFF,
        [],
    ),
    ("qwen3", {"messages": [TURN, CALLING]}, "responses", [TURN, CALLING], {}, ["<think>\n\n</think>\n\n" + WROTE]),
    (
        "qwen3_instruct_2507",
        {"messages": [TURN, CALLING | {"tool_calls": [CALL, CALL]}, RESULT, REPLY]},
        "responses",
        [TURN, CALLING | {"tool_calls": [CALL, CALL]}, RESULT, REPLY],
        {},
        [WROTE[:-11] + "\n" + WROTE, HELLO],
    ),
    (
        "llama3_1",
        {"messages": [TURN, CALLING | {"tool_calls": [{"function": CALLED}]}]},
        "responses",
        [TURN, CALLING],
        {},
        ['{"name": "weather", "parameters": {"town": "Rome", "days": 2}}<|eot_id|>'],
    ),
    (
        "texts",
        {"messages": [TURN, CALLING]},
        "responses",
        [TURN, CALLING | {"tool_calls": [{"function": CALLED}]}],
        {},
        ['weather: {"town": "Rome", "days": 2}<|im_end|>'],
    ),
]


@pytest.mark.parametrize(("name", "row", "needs", "messages", "values", "trained"), RENDERED)
def test_rows_are_rendered_as_transformers_renders_them(
    name: str, row: dict[str, Any], needs: Needs, messages: Any, values: Any, trained: list[str], writers: Any
) -> None:
    tokenizer = writers[name]
    encoded = RowEncoder(tokenizer, DEFAULT_CHAT, 9999).encode(needed_text(row, detect_form(row, needs), needs))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=needs == "prompts", **values)
    whole = [*encoded.prompt, *(token for response in encoded.responses[:1] for token in response.ids)]
    assert whole == tokenizer.encode(text, add_special_tokens=False)
    for response in encoded.responses[:1]:
        runs = groupby(zip(response.ids, response.is_trained, strict=True), lambda pair: pair[1])
        assert [tokenizer.decode([token for token, _ in run]) for is_trained, run in runs if is_trained] == trained


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        (
            "qwen2_5",
            {"messages": [TURN, THOUGHT]},
            "which the chat template does not read: make it a part of the content",
        ),
        (
            "texts",
            {"messages": [TURN, REPLY], "tools": [TOOL]},
            "does not write tools into a prompt, such as 'weather'",
        ),
        ("qwen2_5", {"messages": [TURN, REPLY], "documents": [{"text": "d"}]}, "does not write 'documents' into a"),
        ("llama3", {"messages": [TURN, CALLING]}, "does not write calls of tools ('weather' of 'weather' is left out)"),
        (
            "llama3_1",
            {"messages": [TURN, CALLING | {"content": "Wait."}]},
            "leaves out the text next to a call of a to",
        ),
        (
            "qwen2_5",
            {"prompt": "Hi", "response": "Hello", "tools": [TOOL]},
            "is a text, which none renders: set data.ch",
        ),
    ],
)
def test_values_that_a_template_leaves_out_are_refused(
    name: str, row: dict[str, Any], expected: str, writers: Any, tokenizers: Any
) -> None:
    encoder = RowEncoder((writers | {"llama3": tokenizers["llama3"]})[name], DEFAULT_CHAT, 9999)
    with pytest.raises(UserError) as caught:
        encoder.encode(needed_text(row, detect_form(row, "responses"), "responses"))
    assert expected in str(caught.value)


def test_keys_that_no_template_reads_are_named(writers: Any) -> None:
    turns = [TURN | {"name": "Ann", "mood": 3}, REPLY | {"id": "r1"}]
    row = {"messages": turns, "chat_template_kwargs": {"budget": 3}, "source": "web"}
    encoded = RowEncoder(writers["qwen2_5"], DEFAULT_CHAT, 9999).encode(needed_text(row, "messages", "responses"))
    assert encoded.unread == (
        "column 'source'",
        "key 'name' of messages",
        "key 'mood' of messages",
        "key 'id' of messages",
        "key 'budget' of chat_template_kwargs",
    )
    deaf = ChatFormat(template="{% for message in messages %}{{ message.content if loop.last else '' }}{% endfor %}")
    with pytest.raises(UserError, match="the chat template leaves out the text of a turn of the user"):
        RowEncoder(writers["qwen2_5"], deaf, 9999).encode(needed_text({"prompt": [TURN, REPLY]}, "prompt", "prompts"))
    row = {"messages": [{"role": "system", "content": "Be kind."}, TURN]}
    encoded = RowEncoder(writers["qwen2_5"], deaf, 9999).encode(needed_text(row, "messages", "prompts"))
    assert encoded.unread == ("text of a turn of the system",)


def test_a_system_prompt_without_a_template_is_one_sentence() -> None:
    row = {"question": "Hi", "chosen": "a", "rejected": "b", "system": "Be kind."}
    encoder = RowEncoder(WordTokenizer(), DEFAULT_CHAT, 9999)
    with pytest.raises(
        UserError, match="has no chat template: .*; a system prompt makes a chat of a text, unless data.t"
    ):
        encoder.encode(needed_text(row, "pairs", "pairs"))
    joined = RowLayout(template="{system} {question}")
    assert encoder.encode(needed_text(row, "pairs", "pairs", joined)).text == "Be kind. Hi"


def test_thoughts_of_a_prompt_that_the_template_leaves_out_are_named(writers: Any) -> None:
    """Qwen3's drops those of turns before the last question, as in sampling; a trained turn may not lose its own."""
    row = needed_text({"prompt": [TURN, THOUGHT, TURN]}, "prompt", "prompts")
    encoded = RowEncoder(writers["qwen3"], DEFAULT_CHAT, 9999).encode(row)
    assert "A greeting." not in encoded.text and encoded.unread == ("thought of an earlier turn",)
    deaf = ChatFormat(template="{% for m in messages %}{{ m.content }}{{ m.thinking if loop.first }}{% endfor %}")
    with pytest.raises(UserError, match="leaves out the thought of a turn that is trained on"):
        RowEncoder(writers["qwen3"], deaf, 9999).encode(
            needed_text({"messages": [TURN, THOUGHT]}, "messages", "responses")
        )


def test_further_keys_of_turns_reach_a_reward_model_of_another_family(writers: Any) -> None:
    """Also behind JSON, by which a session sends them to its ranks."""
    row = RowEncoder(writers["qwen2_5"], DEFAULT_CHAT, 9999).encode(
        needed_text({"prompt": [TURN, CALLING, RESULT]}, "prompt", "prompts")
    )
    sent = Example.from_data(Example.to_data([Example(row.prompt, (), (), row.text, {}, row.turns)]))
    assert sent[0].turns == row.turns
    other = writers["llama3_1"]
    ids, _ = TextEncoder("reward", other, 9999).encode(sent[0], (Message("assistant", "Hello"),), is_finished=True)
    text = other.apply_chat_template([TURN, CALLING, RESULT, REPLY], tokenize=False)
    assert ids == other.encode(text, add_special_tokens=False)


def test_values_of_rows_forge_no_turn(writers: Any) -> None:
    """Control tokens in calls, thoughts of a prompt and tools are text, but in turns of the assistant."""
    end = "<|im_end|>"
    tool = {"type": "function", "function": {"name": "weather", "description": end}}
    row = {"prompt": [TURN, RESULT | {"content": end}], "tools": [tool]}
    tokenizer = writers["qwen2_5"]
    encoded = RowEncoder(tokenizer, DEFAULT_CHAT, 9999).encode(needed_text(row, "prompt", "prompts"))
    plain = needed_text({"prompt": [TURN, RESULT], "tools": [TOOL]}, "prompt", "prompts")
    number = RowEncoder(tokenizer, DEFAULT_CHAT, 9999).encode(plain).prompt.count(tokenizer.eos_token_id)
    assert encoded.prompt.count(tokenizer.eos_token_id) == number and encoded.escaped == end
    assert encoded.text.count(end) == number + 2
