"""Programs that call the policy as a model of OpenAI's API, as users write them; with the standard library alone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

Row = dict[str, Any]


def complete(api: Any, path: str, **body: object) -> Any:
    """Return the first choice of a call."""
    head = {"Authorization": f"Bearer {api.api_key}", "Content-Type": "application/json"}
    data = json.dumps({"model": api.model, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{api.base_url}/{path}", data, head)) as reply:
        return json.load(reply)["choices"][0]


def say(api: Any, messages: list[Row], text: str, **body: object) -> str:
    """Add a message of the user and the policy's reply to ``messages``; return the reply."""
    messages.append({"role": "user", "content": text})
    messages.append(complete(api, "chat/completions", messages=messages, **body)["message"])
    return str(messages[-1]["content"])


def two_turns(row: Row, api: Any, bonus: float = 0.0) -> float:
    """Talk twice; the reward is the number of characters."""
    messages: list[Row] = []
    return len(say(api, messages, row["prompt"])) + len(say(api, messages, f"more {api.seed}")) + bonus


async def two_turns_at_once(row: Row, api: Any) -> float:
    """Do the same in a coroutine."""
    return await asyncio.to_thread(two_turns, row, api)


def of_another_interpreter(row: Row, api: Any) -> float:
    """Return whether pydantic is missing, after a turn."""
    say(api, [], "hello")
    return float(importlib.util.find_spec("pydantic") is None)


def completions(row: Row, api: Any) -> float:
    """Continue a text twice."""
    text = row["prompt"]
    for number in range(2):
        text += f" {number}:"
        text += complete(api, "completions", prompt=text, stop="!", max_tokens=3)["text"]
    return float(len(text))


def reasons(row: Row, api: Any) -> float:
    """Write the stop string that ended a turn, and what comes behind it."""
    text = row["prompt"]
    text += complete(api, "completions", prompt=text, stop=["Result:"])["text"] + "Result: 3"
    complete(api, "completions", prompt=text)
    return 1.0


def branches(row: Row, api: Any, order: str = "ab") -> float:
    """Go on with one text in two ways at once, the ways in an order of their beginnings."""
    text = row["prompt"] + complete(api, "completions", prompt=row["prompt"])["text"]

    def go_on(way: str) -> int:
        time.sleep(0.3 * order.index(way))
        return len(complete(api, "completions", prompt=f"{text} {way}")["text"][:1])

    with ThreadPoolExecutor(2) as pool:
        return float(sum(pool.map(go_on, "ab")))


def without_end(row: Row, api: Any) -> float:
    """Talk until the policy says no more."""
    messages: list[Row] = []
    try:
        while True:
            say(api, messages, "and then?")
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["code"] == "context_length_exceeded"
        return float(len(messages))


def without_end_or_reward(row: Row, api: Any) -> float:
    """Talk until a call raises."""
    messages: list[Row] = []
    while True:
        say(api, messages, "and then?")


def misbehaves(row: Row, api: Any) -> Any:
    """Do what the row has."""
    kind = row["prompt"]
    if kind == "early":
        return 1.0
    messages: list[Row] = []
    say(api, messages, kind)
    match kind:
        case "raise":
            raise ValueError("no more")
        case "text":
            return "a lot"
        case "sleep":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "insist":
            while True:
                with suppress(urllib.error.HTTPError):
                    say(api, [], "another conversation")
        case "forget":
            say(api, [], "another conversation")
        case "hot":
            complete(api, "chat/completions", messages=messages, temperature=0.1)
        case "threads":
            threading.Thread(target=time.sleep, args=(60,)).start()
    say(api, messages, "on")
    return 1.0


def with_helpers(row: Row, api: Any) -> float:
    """Talk, then have three helpers work at once, two of them on the same, and talk on."""
    messages: list[Row] = []
    said = say(api, messages, row["prompt"])

    def helper(task: str) -> str:
        own: list[Row] = []
        return say(api, own, task) + say(api, own, "more")

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(helper, [f"{said} b", f"{said} a", f"{said} a"]))
    say(api, messages, " ".join(found))
    return float(len("".join(found)))
