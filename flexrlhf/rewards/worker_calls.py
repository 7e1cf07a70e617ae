"""What runs in a worker process: here alone a user's code is loaded and called. The standard library alone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from flexrlhf.rewards.base import Batch, Problem, Reply, nothing
from flexrlhf.rewards.replies import BadReply, read_reply


def load(reference: str) -> Problem | None:
    """Load the function, once in a process."""
    with _Held("load", "could not be loaded") as held:
        function_of(reference)
    return held.problem


def call(reference: str, level: str, batch: Batch) -> Reply:
    """The function's scores of a batch; whatever it raises is a reply with a problem."""
    with _Held("raise", "raised") as held:
        function = function_of(reference)
        columns = _accepted(function, {**batch.columns, "num_tokens": batch.num_tokens})
        return read_reply(function(batch.prompts, batch.responses, **columns), batch.num_tokens, level)
    assert held.problem is not None, "a call that neither returned nor raised"
    return nothing(batch, held.problem)


def match(pattern: str, batch: Batch) -> Reply:
    """1 for each answer that is, as a whole and without blanks around it, what ``pattern`` describes."""
    expression = re.compile(pattern, re.DOTALL)
    return Reply([float(expression.fullmatch(response.strip()) is not None) for response in batch.responses])


@functools.cache
def function_of(reference: str) -> Callable[..., Any]:
    """``path/to/file.py:name`` or ``module:name``; modules are found in the working directory too."""
    place, _, name = reference.rpartition(":")
    sys.path.insert(0, os.getcwd())
    module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _module_of_file(file: Path) -> ModuleType:
    """Files beside it are found as where a script is run."""
    name = _name_of(file)
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file}: no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _name_of(file: Path) -> str:
    """Its own where that is free, as processes that the user's code starts look for its functions by the module's name;
    else one that no other module has."""
    is_known = not file.stem.isidentifier() or file.stem in sys.modules
    found = None if is_known else importlib.util.find_spec(file.stem)
    is_other = found is not None and (found.origin is None or Path(found.origin).resolve() != file.resolve())
    return f"flexrlhf_scores_{file.stem}" if is_known or is_other else file.stem


def _accepted(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The columns that ``function`` takes by name, beside its first two parameters: the texts."""
    parameters = inspect.signature(function).parameters
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    texts = [name for name, parameter in parameters.items() if parameter.kind in by_place][:2]
    named = {name for name, parameter in parameters.items() if parameter.kind in by_name}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: values for name, values in columns.items() if name not in texts and (takes_all or name in named)}


class _Held:
    """Holds back whatever a user's code raises, ``sys.exit`` too: it costs a score, not the process."""

    def __init__(self, kind: str, verb: str) -> None:
        self._kind, self._verb = kind, verb
        self.problem: Problem | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, BadReply):
            self.problem = Problem("reply", str(error))
        elif error is not None:
            self.problem = Problem(self._kind, f"{self._verb} {_one_line(error)}")
        return True


def _one_line(error: BaseException) -> str:
    """The last line of the traceback, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
    return f"{text:.300}{where}"
