"""Replies as families of models write them, with two calls of the tool ``add``."""

from __future__ import annotations

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "c": {"type": "array"},
                    "d": {"type": "boolean"},
                },
            },
        },
    }
]
ARGUMENTS = {"a": 1, "b": '5, é "{y}: z"', "c": [1, {"k": None}], "d": True}
JSON = '{"a": 1, "b": "5, é \\"{y}: z\\"", "c": [1, {"k": null}], "d": true}'
CALL = f'{{"name": "add", "arguments": {JSON}}}'
EMPTY = '{"name": "add", "arguments": {}}'
TEXT = "It is an addition."
"""Content in front of the calls."""
REPLIES = {
    "hermes": [f"{TEXT}\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{EMPTY}\n</tool_call>"],
    "qwen3_coder": [
        f"{TEXT}\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{ARGUMENTS['b']}\n"
        '</parameter>\n<parameter=c>\n[1, {"k": null}]\n</parameter>\n<parameter=d>\nTrue\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>"
    ],
    "llama3": [f"{TEXT}<|python_tag|>{CALL.replace('arguments', 'parameters')}; {EMPTY}"],
    "pythonic": [
        f"{TEXT}{begin}[add(a=1, b='5, é \"{{y}}: z\"', c=[1, {{'k': None}}], d={true}), add()]{end}"
        for begin, end, true in [
            ("<|tool_call_start|>", "<|tool_call_end|>", "True"),
            ("<|python_start|>", "<|python_end|>", "true"),
        ]
    ]
    + [
        f"{TEXT}\n<function_calls>\nadd(a=1, b='5, é \"{{y}}: z\"', c=[1, {{'k': null}}], d=true)\nadd()\n"
        "</function_calls>"
    ],
    "mistral": [
        f"{TEXT}[TOOL_CALLS][{CALL}, {EMPTY}]",
        f"{TEXT}[TOOL_CALLS]add[ARGS]{JSON}[TOOL_CALLS]add[ARGS]{{}}",
        f"{TEXT}[TOOL_CALLS]add[CALL_ID]9hZk2aB1c[ARGS]{JSON}[TOOL_CALLS]add{{}}",
    ],
    "deepseek_v3": [
        f"{TEXT}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        f"{TEXT}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "glm45": [
        f"{TEXT}\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        f'<arg_value>{ARGUMENTS["b"]}</arg_value>\n<arg_key>c</arg_key>\n<arg_value>[1, {{"k": null}}]</arg_value>\n'
        "<arg_key>d</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n<tool_call>add\n</tool_call>"
    ],
    "kimi_k2": [
        f"{TEXT}<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ],
    "functiongemma": [
        f"{TEXT}<start_function_call>call:add{{a:1,b:<escape>{ARGUMENTS['b']}<escape>,c:[1,{{k:null}}],d:true}}"
        "<end_function_call><start_function_call>call:add{}<end_function_call>"
    ],
    "gemma4": [
        f'{TEXT}<|tool_call>call:add{{a:1,b:<|"|>{ARGUMENTS["b"]}<|"|>,c:[1,{{k:None}}],d:true}}<tool_call|>'
        "<|tool_call>call:add{}<tool_call|>"
    ],
    "phi4_mini": [
        f"{TEXT} functools[{CALL}, {EMPTY}]",
        f"{TEXT}<|tool_call|>[{CALL}, {EMPTY}]<|/tool_call|>",
    ],
    "harmony": [
        f"<|channel|>commentary<|message|>{TEXT}<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{JSON}<|call|><|start|>assistant to=functions.add<|channel|>commentary json"
        "<|message|>{}"
    ],
}
"""Replies by form, each with TEXT and calls with ARGUMENTS and with none."""
THOUGHTS = {
    "mistral": "[THINK]{}[/THINK]",
    "gemma4": "<|channel>thought\n{}<channel|>",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
}
"""Thoughts by form; of others ``<think>``."""
THINK = "<think>{}</think>"
