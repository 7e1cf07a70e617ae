"""Functions of a user for test_rewards.py, which names this file as a user would: good ones, and all that go wrong."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 3


def lengths(prompts: list[str], responses: list[str]) -> list[int]:
    return [len(response) for response in responses]


def by_columns(prompts: list[str], responses: list[str], right: list[str], bonus: list[float]) -> list[float]:
    return [
        (answer == truth) + more for answer, truth, more in zip(responses, right, [x or 0 for x in bonus], strict=True)
    ]


def names_of_columns(prompts: list[str], responses: list[str], **columns: Any) -> list[int]:
    assert set(columns) == {"right", "no identifier", "num_tokens"}, columns
    return columns["num_tokens"]


def takes_a_column_for_a_text(question: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Its first two names are columns of the data, too."""
    assert columns.keys().isdisjoint({"question", "answer"})
    return [float(text == "said") for text in answer]


def per_token(prompts: list[str], responses: list[str], num_tokens: list[int]) -> list[list[float]]:
    return [[float(position) for position in range(count)] for count in num_tokens]


def by_step(prompts: list[str], responses: list[str], steps: list[list[str]]) -> list[list[float]]:
    return [[float(len(step)) for step in each] for each in steps]


def by_end(prompts: list[str], responses: list[str]) -> list[list[tuple[int, float]]]:
    return [[(end + 1, 1.0) for end, sign in enumerate(text) if sign == "."] for text in responses]


def one_token_short(prompts: list[str], responses: list[str], num_tokens: list[int]) -> list[list[float]]:
    return [[1.0] * (count - (response == "short")) for response, count in zip(responses, num_tokens, strict=True)]


def loaded_heavy(prompts: list[str], responses: list[str]) -> list[bool]:
    return [bool({"torch", "numpy", "transformers", "pydantic"} & set(sys.modules))] * len(prompts)


def process(prompts: list[str], responses: list[str]) -> list[int]:
    time.sleep(0.2)
    return [os.getpid()] * len(prompts)


def by_response(prompts: list[str], responses: list[str]) -> Any:
    """Follow the first response of the batch; the score is otherwise the response's length."""
    values: list[Any] = [float(len(response)) for response in responses]
    match responses[0]:
        case "hang":
            time.sleep(1000)
        case "hang in C":
            ctypes.PyDLL(None).sleep(1000)
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(7)
        case "die quietly":
            os._exit(0)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise ValueError("no such\nthing")
        case "escapes":
            raise ValueError("\x1b[2J gone")
        case "emptied":
            responses.clear()
            return []
        case "count":
            return values + [1.0]
        case "text":
            return ["1.0"] * len(values)
        case "none":
            return None
        case "one none":
            values[0] = None
        case "nan":
            values[0] = float("nan")
    return values


def writes_its_process(prompts: list[str], responses: list[str]) -> list[float]:
    Path(prompts[0]).write_text(str(os.getpid()))
    time.sleep(1000)
    return []


def holds_the_interpreter(prompts: list[str], responses: list[str]) -> list[float]:
    """No other thread of the process runs until the pattern has been tried, which takes for ever."""
    Path(prompts[0]).write_text(str(os.getpid()))
    re.fullmatch("(a|a)*", "a" * 60 + "b")
    return []


def starts_a_process(prompts: list[str], responses: list[str]) -> list[float]:
    """Start a process and do not wait for it; the response names what follows."""
    Path(prompts[0]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    if responses[0] == "hang":
        time.sleep(1000)
    if responses[0] == "die":
        os._exit(7)
    return [1.0]


def texts_by_place(prompts: list[str], responses: list[str], /, right: list[str]) -> list[bool]:
    return [response == truth for response, truth in zip(responses, right, strict=True)]


def texts_by_place_and_all(prompts: list[str], responses: list[str], /, **columns: Any) -> list[int]:
    assert set(columns) == {"right", "num_tokens"}, columns
    return columns["num_tokens"]


def needs_columns(
    prompts: list[str], responses: list[str], num_tokens: list[int], right: list[str], bonus: Any = None, *, mark: Any
) -> list[float]:
    return [0.0] * len(prompts)


async def waits(prompts: list[str], responses: list[str]) -> list[float]:
    return [0.0] * len(prompts)


def tags(prompts: list[str], responses: list[str]) -> list[float]:
    return [float("<think>" in response and "</think>" in response) for response in responses]
