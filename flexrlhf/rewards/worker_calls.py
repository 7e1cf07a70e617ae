"""Calls that run in a worker process: here alone a user's code is loaded and run. The standard library alone."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from flexrlhf.rewards.base import Reply, ScoreBatch, ScoreFailure, failed_reply
from flexrlhf.rewards.replies import BadReply, read_reply
from flexrlhf.user_code.loading import line_of, load_function


def load(reference: str) -> ScoreFailure | None:
    """Load the function, once in a process. Return why it could not be loaded."""
    with _Caught("load", "could not be loaded") as caught:
        function_of(reference)
    return caught.failure


def call(reference: str, level: str, batch: ScoreBatch) -> Reply:
    """Return the function's scores of a batch; whatever it raises is a reply with a failure."""
    with _Caught("raise", "raised") as caught:
        function = function_of(reference)
        steps = {} if batch.steps is None else {"steps": batch.steps}
        columns = _accepted(function, {**batch.columns, "num_tokens": batch.num_tokens, **steps})
        return read_reply(function(batch.prompts, batch.responses, **columns), batch, level)
    assert caught.failure is not None, "a call that neither returned nor raised"
    return failed_reply(batch, caught.failure)


def match(pattern: str, batch: ScoreBatch) -> Reply:
    """Return 1 for each response that ``pattern`` matches as a whole, without blanks around it, else 0."""
    expression = re.compile(pattern, re.DOTALL)
    return Reply([float(expression.fullmatch(response.strip()) is not None) for response in batch.responses])


@functools.cache
def function_of(reference: str) -> Callable[..., Any]:
    """Load a function, once in a process: a run goes on with the code that it began with."""
    return load_function(reference)


def _accepted(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that ``function`` takes by name; its first two parameters are the texts."""
    parameters = inspect.signature(function).parameters
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    texts = [name for name, parameter in parameters.items() if parameter.kind in by_place][:2]
    named = {name for name, parameter in parameters.items() if parameter.kind in by_name}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: values for name, values in columns.items() if name not in texts and (takes_all or name in named)}


class _Caught:
    """Context that catches whatever a user's code raises, ``sys.exit`` too: it costs a score, not the process."""

    def __init__(self, kind: str, verb: str) -> None:
        self._kind, self._verb = kind, verb
        self.failure: ScoreFailure | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, BadReply):
            self.failure = ScoreFailure("reply", str(error))
        elif error is not None:
            self.failure = ScoreFailure(self._kind, f"{self._verb} {line_of(error)}")
        return True
