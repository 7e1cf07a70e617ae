"""JSON schemas of the tools of an environment, by transformers' own function, and checks of its class.

A user's code is loaded in a process of its own alone. Tools are the functions of ``environment.tools`` and, of a class
in TRL's form, its public methods; environments of packages have tools of their own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flexrlhf.config.code_checks import check_function
from flexrlhf.config.code_loading import load_function
from flexrlhf.config.environment_settings import BY_TEMPLATE, EnvironmentSpec
from flexrlhf.config.proxies import is_address
from flexrlhf.data.chat import Tool
from flexrlhf.data.turn_tokens import EXAMPLE, TurnTokens
from flexrlhf.environments.call_forms import FORMS, ToolCall
from flexrlhf.environments.class_checks import class_facts, program_facts
from flexrlhf.environments.sources import is_installed, package_of, program_of
from flexrlhf.environments.tool_calls import parse_calls
from flexrlhf.environments.tool_runs import has_steps, tool_names
from flexrlhf.errors import UserError, nearest
from flexrlhf.user_code.call_failures import Caught
from flexrlhf.user_code.planning_calls import run_apart, serve_call

Made = list[Tool] | str
"""Schemas of the tools of one setting, or why there are none."""


@dataclass(frozen=True)
class EnvironmentTools:
    """Tools of an environment, and the user's code that they and its class are made of.

    settings:  of the environment.
    """

    settings: EnvironmentSpec

    @property
    def has_code(self) -> bool:
        """Whether the files of all functions and classes are there: a run may be planned on another machine."""
        files = [reference.rpartition(":")[0] for reference in self._places.values()]
        return all(Path(file).is_file() for file in files if file.endswith(".py"))

    def schemas(self) -> tuple[Tool, ...]:
        """Return the schemas of all tools, in order. Raises UserError for a tool without one, or two of one name."""
        places = self._places
        for key, reference in places.items():
            check_function(reference, key, may_be_async=True)
        found: list[Made] = _in_process(_SCHEMAS, *places.values()) if places else []
        tools: dict[str, Tool] = {}
        for (key, reference), made in zip(places.items(), found, strict=True):
            if isinstance(made, str):
                raise UserError(f"{key}: {reference}: {made}")
            for schema in made:
                name = schema["function"]["name"]
                if name in tools:
                    raise UserError(f"{key}: {reference}: there is another tool named {name!r}; give it another name")
                tools[name] = schema
        return tuple(tools.values())

    def with_known_form(self, tokens: TurnTokens) -> EnvironmentSpec:
        """Return the settings in which ``auto`` is the form by which a call is read that the chat template writes.

        Raises UserError unless it is one form.
        """
        if self.settings.tool_format != BY_TEMPLATE:
            return self.settings
        (name, arguments), written = EXAMPLE, tokens.written_call()
        texts = {name: [key for key, value in arguments.items() if isinstance(value, str)]}
        found = [form for form in FORMS if parse_calls(written, form, texts) == ([ToolCall(name, arguments)], [])]
        if len(found) != 1:
            reads = f"{' and '.join(found)} read" if found else "no known form reads"
            raise UserError(
                f"environment.tool_format: {BY_TEMPLATE} is the form in which the chat template writes calls, and "
                f"{reads} them; name the form of the policy's calls, or give a regular expression"
            )
        return self.settings.model_copy(update={"tool_format": found[0]})

    @property
    def _places(self) -> dict[str, str]:
        """Functions and classes with tools, by setting."""
        places = {f"environment.tools.{number}": reference for number, reference in enumerate(self.settings.tools)}
        # a package's tools are its own, and a program gives its own with each call
        if self.settings.path is not None and self.settings.api is None and package_of(self.settings.path) is None:
            places["environment.path"] = self.settings.path
        return places

    def check_class(self, columns: Collection[str] | None = None) -> None:
        """Raise UserError for a class that could not run episodes: its code, its arguments, its form.

        ``columns``: of the data, which a class in TRL's form receives by name; None: they are not known.
        """
        if self.settings.path is None or (self.settings.api is not None and is_address(self.settings.path)):
            return
        package = package_of(self.settings.path)
        if package is None:
            check_function(self.settings.path, "environment.path", may_be_async=True)
        elif self.settings.python is None and not is_installed(package[0]):
            return
        if self.settings.api is None:
            facts = _in_process(_CLASS, self.settings.path, json.dumps(self.settings.options, default=str))
        else:
            program, options = program_of(self.settings)
            facts = _in_process(_PROGRAM, program, json.dumps(options, default=str), self.settings.python)
        if "problem" in facts:
            setting, sentence = facts["problem"]
            raise UserError(f"environment.{setting}: {self.settings.path}: {sentence}")
        if columns is None:
            return
        for name in facts.get("needed", ()):
            if name not in columns:
                raise UserError(
                    f"environment.path: reset of {self.settings.path} takes {name!r}, no column of the data"
                    f"{nearest(name, columns)}; there are {', '.join(columns)}"
                )
        taken = facts.get("taken")
        for name in columns if taken is not None else ():
            if name not in taken:
                raise UserError(
                    f"environment.path: reset of {self.settings.path} does not take the column {name!r} of the data; "
                    f"add it, or **columns"
                )


_SCHEMAS, _CLASS, _PROGRAM = "schemas", "class", "program"
"""Kinds of work of a process that loads a user's code."""


@cache
def _in_process(*work: str | None) -> Any:
    """Return the result of loading a user's code, once in a process: a run goes on with the tools it began with.

    ``work``: its kind, and its arguments.
    """
    # no worker: it would run the main script of this process again, which may plan runs
    return run_apart(__name__, work, "environment: its code")[0]


def make_schemas(references: Sequence[str]) -> list[Made]:
    """Load the code of each of ``references`` in this process, and return its schemas."""
    return [_made(reference) for reference in references]


def _made(reference: str) -> Made:
    with Caught("load", "could not be loaded:") as caught:
        tools = list(_tools(load_function(reference)))
        return _schemas(tools) if tools else []
    assert caught.failure is not None, "code that neither returned nor raised"
    return caught.failure.text


def _schemas(tools: Sequence[Callable[..., Any]]) -> Made:
    # slow to load, and only a process with tools needs it
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return [get_json_schema(tool) for tool in tools]
    except (DocstringParsingException, TypeHintParsingException) as error:
        return " ".join(str(error).split())


def _tools(found: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function, or the methods that are tools of a class."""
    if not inspect.isclass(found):
        yield found
    elif not has_steps(found):
        yield from (getattr(found, name) for name in tool_names(found))


def _work(task: Sequence[str]) -> Any:
    kind, *arguments = task
    if kind == _SCHEMAS:
        return make_schemas(arguments)
    if kind == _PROGRAM:
        return program_facts(arguments[0], json.loads(arguments[1]), arguments[2])
    return class_facts(arguments[0], json.loads(arguments[1]))


if __name__ == "__main__":
    serve_call(_work)
