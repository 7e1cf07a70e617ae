"""Runs of tools: functions that the policy calls. Worker processes load this: the standard library alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, getattr_static, getmembers, isawaitable, isfunction, signature
from typing import Any

from flexrlhf.config.code_loading import load_function
from flexrlhf.environments.call_forms import ToolCall
from flexrlhf.environments.tool_calls import ONLY, parse_calls
from flexrlhf.environments.turn_checks import ADDRESS, MAX_CHARACTERS, MAX_MESSAGES, read_text, shown_value
from flexrlhf.errors import nearest
from flexrlhf.user_code.call_failures import BadReply, Caught

Functions = Mapping[str, Callable[..., Any]]
NO_TOOLS = ("reset", "close", "get_reward")
"""Methods of an environment in TRL's form that are called for the run; a policy calls the others."""
ROLE = "tool"
"""Role of a result."""
LEAST_ROOM = 256
"""Characters that are left for the sentence that results are too long."""


def load_tools(references: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Load functions, by name."""
    return {function.__name__: function for function in map(load_function, references)}


def parameters_of(kind: type, method: str) -> list[Parameter] | None:
    """Return the parameters with which a method of an object is called; None if they are not known."""
    found = getattr_static(kind, method)
    is_bound = isinstance(found, staticmethod | classmethod)
    try:
        parameters = [*signature(getattr(kind, method) if is_bound else found).parameters.values()]
    except (ValueError, TypeError):
        return None
    takes_object = parameters and parameters[0].kind is not Parameter.VAR_POSITIONAL
    return parameters if is_bound or not takes_object else parameters[1:]


def has_steps(kind: type) -> bool:
    """Whether a class has ``reset(row, seed)`` and ``step(reply)``; else it has TRL's form, with ``step`` as a tool.

    The names of the parameters of ``reset`` decide, unless ``step`` is declared to return a Turn.
    """
    if not hasattr(kind, "step"):
        return False
    parameters, returned = parameters_of(kind, "reset"), getattr(kind.step, "__annotations__", {}).get("return")
    if parameters is None or "Turn" in str(returned):
        return True
    names = {each.name.strip("_") for each in parameters}
    return not names.isdisjoint(("row", "seed")) or any(each.kind is Parameter.VAR_POSITIONAL for each in parameters)


def tool_names(kind: type) -> list[str]:
    """Return the methods that are tools of a class in TRL's form: all public ones but a few."""
    return [name for name, _ in getmembers(kind, isfunction) if not name.startswith("_") and name not in NO_TOOLS]


def tool_methods(environment: object) -> dict[str, Callable[..., Any]]:
    """Return the methods that are tools of an environment in TRL's form, by name."""
    return {name: getattr(environment, name) for name in tool_names(type(environment))}


class ToolRuns:
    """Tools of one episode.

    form:  how calls are written, as the setting ``tool_format``
    """

    def __init__(self, functions: Functions, form: str) -> None:
        self._functions, self._form = functions, form
        self._texts = {name: _text_parameters(function) for name, function in functions.items()}

    async def run(self, text: str) -> tuple[tuple[tuple[str, str], ...], int, int]:
        """Run the calls of a turn, one after another; return a message for each, their number, and how many failed.

        A call fails if it cannot be parsed, names no tool, has other arguments, or its tool raises: the message then
        begins with ``error:``. Once results have too many characters together, the calls that follow are not run.
        Raises BadReply for a result that is no text and no JSON.
        """
        calls, errors = parse_calls(text, self._form, self._texts) if self._functions else ([], [])
        results, room = list[tuple[str, bool]](), MAX_CHARACTERS
        for number, call in enumerate([*calls, *errors]):
            result = await self._result(self._named(call)) if isinstance(call, ToolCall) else (f"error: {call}", True)
            room -= len(ROLE) + len(result[0])
            if room < LEAST_ROOM or number >= MAX_MESSAGES - 1:
                left = len(calls) + len(errors) - number
                results.append((f"error: the results of a turn are too long; the last {left} are left out", True))
                break
            results.append(result)
        failed = sum(has_failed for _, has_failed in results)
        return tuple((ROLE, text) for text, _ in results), len(calls) + len(errors), failed

    def _named(self, call: ToolCall) -> ToolCall:
        """Return a call with the name of its tool, if it is the only one."""
        is_only = call.name == ONLY and len(self._functions) == 1
        return replace(call, name=next(iter(self._functions))) if is_only else call

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        """Return the text of a call's result, and whether the call failed."""
        with Caught("raise", f"{call.name} raised", passes=(asyncio.CancelledError, UnreadableResult)) as caught:
            return as_text(await finished(self._function(call)(**call.arguments)), call.name), False
        assert caught.failure is not None, "a call that neither returned nor raised"
        # an address would differ in a replay
        return f"error: {ADDRESS.sub('<an object', caught.failure.text)}", True

    def _function(self, call: ToolCall) -> Callable[..., Any]:
        """Return the tool of a call. Raises BadReply for one that does not exist, or takes other arguments."""
        function = self._functions.get(call.name)
        if function is None:
            near = nearest(call.name, self._functions)
            raise BadReply(f"no tool {call.name!r:.60}{near}; there are {', '.join(self._functions)}")
        try:
            signature(function).bind(**call.arguments)
        except TypeError as error:
            raise BadReply(f"{call.name}: {error}") from None
        return function


def _text_parameters(function: Callable[..., Any]) -> set[str]:
    """Return the parameters of a tool that are texts, by its type hints."""
    hints = getattr(function, "__annotations__", {})
    texts = (str, str | None, "str", "str | None", "Optional[str]")
    return {name for name, hint in hints.items() if hint in texts}


async def finished(value: Any) -> Any:
    """Return the result of a function that may be ``async``.

    Raises BadReply where nothing can be waited for, as all functions seem to be plain ones.
    """
    if not isawaitable(value):
        return value
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise BadReply("returned something to wait for, but is no async def") from None
    return await value


class UnreadableResult(BadReply):
    """A result of a tool that is no text and no JSON: its episode fails, as no policy could mend it."""


def as_text(value: Any, name: str = "a tool") -> str:
    """Return the result of the tool ``name`` as text: JSON, unless it is one.

    Raises BadReply for one that is too long, and UnreadableResult for one that is no JSON, or that no other process
    repeats. Values such as dates and decimals are written as texts.
    """
    if isinstance(value, str):
        return read_text(value)
    try:
        text = json.dumps(value, ensure_ascii=False, default=_written)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnreadableResult(f"{name} returned {shown_value(value)}, which is no text and no JSON: {error}") from None
    if (found := ADDRESS.search(text)) is not None:
        raise UnreadableResult(f"{name} returned {found.group()}>, an object, instead of a text or what JSON has")
    return read_text(text)


def _written(value: Any) -> str:
    """Return a value inside of a result as text. Raises TypeError for one without an order, or without a text."""
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        raise TypeError(f"it has {type(value).__name__}")
    return str(value)
