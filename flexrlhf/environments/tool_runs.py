"""Runs of tools: functions that the policy calls. Worker processes load this: the standard library alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import getmembers, isawaitable, isfunction, signature
from typing import Any

from flexrlhf.config.code_loading import load_function
from flexrlhf.environments.tool_calls import ONLY, ToolCall, parse_calls
from flexrlhf.environments.turn_checks import read_text
from flexrlhf.errors import nearest
from flexrlhf.user_code.call_failures import BadReply, Caught

Functions = Mapping[str, Callable[..., Any]]
NO_TOOLS = ("reset", "step", "close", "get_reward")
"""Methods of an environment that are called for the run; a policy calls the others."""


def load_tools(references: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Load functions, by name."""
    return {function.__name__: function for function in map(load_function, references)}


def tool_names(kind: type) -> list[str]:
    """Return the methods that are tools of a class without ``step``, as in TRL: all public ones but a few."""
    return [name for name, _ in getmembers(kind, isfunction) if not name.startswith("_") and name not in NO_TOOLS]


def tool_methods(environment: object) -> dict[str, Callable[..., Any]]:
    """Return the methods that are tools of an environment without ``step``, by name."""
    return {name: getattr(environment, name) for name in tool_names(type(environment))}


class ToolRuns:
    """Tools of one episode.

    form:  how calls are written, as the setting ``tool_format``
    """

    def __init__(self, functions: Functions, form: str) -> None:
        self._functions, self._form = functions, form

    async def run(self, text: str) -> tuple[tuple[tuple[str, str], ...], int, int]:
        """Run the calls of a turn, one after another; return a message for each, their number, and how many failed.

        A call fails if it cannot be parsed, names no tool, has other arguments, or its tool raises: the message then
        begins with ``error:``.
        """
        calls, errors = parse_calls(text, self._form) if self._functions else ([], [])
        results = [await self._result(self._named(call)) for call in calls]
        results += [(f"error: {error}", True) for error in errors]
        return tuple(("tool", text) for text, _ in results), len(results), sum(has_failed for _, has_failed in results)

    def _named(self, call: ToolCall) -> ToolCall:
        """Return a call with the name of its tool, if it is the only one."""
        is_only = call.name == ONLY and len(self._functions) == 1
        return replace(call, name=next(iter(self._functions))) if is_only else call

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        """Return the text of a call's result, and whether the call failed."""
        with Caught("raise", f"{call.name} raised", passes=(asyncio.CancelledError,)) as caught:
            return as_text(await finished(self._function(call)(**call.arguments))), False
        assert caught.failure is not None, "a call that neither returned nor raised"
        return f"error: {caught.failure.text}", True

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


def as_text(value: Any) -> str:
    """Return the result of a tool as text: JSON, unless it is one. Raises BadReply for one that is too long."""
    return read_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
