"""The forms of calls and thoughts, compared with parsers of vLLM."""

from __future__ import annotations

import json
import re
from itertools import chain

import pytest
from family_replies import REPLIES, TEXT, THINK, THOUGHTS, TOOLS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexrlhf.environments.tool_calls import read_reply

pytest.importorskip("vllm")

PARSERS = {
    "hermes": ["hermes"],
    "qwen3_coder": ["qwen3_coder"],
    "llama3": ["llama3_json"],
    "pythonic": ["lfm2", "llama4_pythonic", "olmo3"],
    "mistral": ["mistral", "mistral", "mistral"],
    "deepseek_v3": ["deepseek_v3", "deepseek_v31"],
    "glm45": ["glm45"],
    "kimi_k2": ["kimi_k2"],
    "functiongemma": ["functiongemma"],
    "gemma4": ["gemma4"],
    "phi4_mini": ["phi4_mini_json"],
}
"""Names of vLLM's parsers by form, of its replies in order; harmony's needs a vocabulary from elsewhere."""
DIFFERENT = {
    "llama3_json": "leaves out the text in front of a call",
    "llama4_pythonic": "reads nothing behind a text",
    "olmo3": "leaves out the text in front of a call",
    "mistral": "reads a call's id as a part of its name",
    "functiongemma": "leaves out values that are no text",
    "gemma4": "reads values inside of lists as texts",
    "phi4_mini_json": "reads no list in an argument, and leaves out the text in front of a call",
}
"""Parsers of vLLM that read one of the replies in another way."""
REASONING = {
    "hermes": "qwen3",
    "deepseek_v3": "deepseek_r1",
    "mistral": "mistral",
    "glm45": "glm45",
    "gemma4": "gemma4",
}
"""Names of vLLM's parsers of thoughts."""
MARKS = {
    mark
    for text in chain(*REPLIES.values(), THOUGHTS.values(), [THINK])
    for mark in re.findall(r"</?[^\s<>=]+>|\[/?[A-Z_]+\]", text)
}


def tokenizer(without: str = "") -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and the marks of all forms."""
    letters = {letter: place for place, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=sorted(MARKS - {without}))


def test_calls_are_those_of_vllm() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # Mistral's older tokenizers lack this mark
    with_mark, without = tokenizer(), tokenizer("[ARGS]")
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    different = set()
    for form, names in PARSERS.items():
        for name, text in zip(names, REPLIES[form], strict=False):
            parser = ToolParserManager.get_tool_parser(name)(with_mark if "[ARGS]" in text else without, request.tools)
            found = parser.extract_tool_calls(text, request)
            theirs = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
            content, _, calls = read_reply(text, form, TOOLS)
            ours = [(call.name, json.loads(call.arguments)) for call in calls]
            if (theirs, (found.content or "").strip()) != (ours, content):
                different.add(name)
    assert different == set(DIFFERENT)


@pytest.mark.parametrize(("form", "name"), REASONING.items())
def test_thoughts_are_those_of_vllm(form: str, name: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}])
    parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer())
    thought = THOUGHTS.get(form, THINK)
    for text in (thought.format("\nWhy?\n") + f"\n\n{TEXT}", thought.format("Why?")):
        theirs = [(each or "").strip() for each in parser.extract_reasoning(text, request)]
        content, reasoning, _ = read_reply(text, form)
        assert [reasoning, content] == theirs
