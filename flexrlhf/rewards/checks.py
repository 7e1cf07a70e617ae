"""Checks of the sources of scores before a run starts. A user's file is read here, not run: it may do anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence

from flexrlhf.config.reward_sources import FunctionSource, RewardSource, RuleSource, ServiceSource
from flexrlhf.config.secrets import expanded, expanded_url
from flexrlhf.errors import UserError, nearest, shown
from flexrlhf.user_code.checks import check_function, definitions, python_file

OWN_COLUMNS = ("num_tokens",)
"""What a function may take in addition to the columns of the data."""


def check_sources(sources: Sequence[RewardSource], name: str = "reward") -> None:
    """Raise UserError for the first of the sources of section ``name`` that could not be called, models aside.

    A name that a module imports by ``import *``, or a module of another kind than a Python file, is not checked.
    """
    for index, source in enumerate(sources):
        section = name if len(sources) == 1 else f"{name}.{index}"
        match source:
            case FunctionSource():
                check_function(source.function, f"{section}.function")
            case ServiceSource():
                _check_service(source, section)
            case RuleSource(pattern=str(pattern)):
                _check_pattern(pattern, f"{section}.pattern")


def check_columns(
    sources: Sequence[RewardSource], name: str, columns: Collection[str], path: str, with_functions: bool = True
) -> None:
    """Raise UserError for the first source of section ``name`` that needs a column that no row of ``path`` has.

    A service needs a label that is written in the YAML; a function needs its parameters without a default, where its
    ``def`` can be read. ``with_functions``: whether the files of functions have been checked, so that they are read.
    """
    for index, source in enumerate(sources):
        section = name if len(sources) == 1 else f"{name}.{index}"
        match source:
            case FunctionSource() if with_functions:
                needed = [(f"{section}.function: {source.function} takes", key) for key in _needed(source)]
            case ServiceSource() if "label" in source.model_fields_set:
                needed = [(f"{section}.label:", source.label)]
            case RuleSource(rule="exact_answer" | "gsm8k"):
                needed = [(f"{section}.answer:", source.answer)]
            case _:
                needed = []
        for words, column in needed:
            if column not in columns:
                raise UserError(
                    f"{words} {shown(column)}, no column of {path}{nearest(column, columns)}; "
                    f"there are {', '.join(columns)}"
                )


def _needed(source: FunctionSource) -> list[str]:
    """Return the columns that a function cannot be called without; none where its parameters are not certain.

    A decorator, or a second ``def``, may change its parameters.
    """
    own = OWN_COLUMNS if source.separator is None else (*OWN_COLUMNS, "steps")
    place, _, name = source.function.rpartition(":")
    file = python_file(place, "function")
    nodes = [node for other, node in definitions(ast.parse(file.read_bytes()).body) if other == name] if file else []
    match nodes:
        case [ast.FunctionDef(args=parameters, decorator_list=[])]:
            return [column for column in _without_default(parameters) if column not in own]
    return []


def _without_default(parameters: ast.arguments) -> list[str]:
    """Return the parameters without a default that come after the two texts."""
    by_place = [*parameters.posonlyargs, *parameters.args]
    required = by_place[2 : len(by_place) - len(parameters.defaults)]
    named = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    return [parameter.arg for parameter in [*required, *(one for one, default in named if default is None)]]


def _check_pattern(pattern: str, key: str) -> None:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"{key}: no regular expression: {error}, found {shown(pattern)}") from None


def _check_service(source: ServiceSource, section: str) -> None:
    # slow to load, and few plans need it
    import httpx

    for url in source.url:
        try:
            host = httpx.URL(expanded_url(url, f"{section}.url")).host
        except httpx.InvalidURL:
            host = ""
        if not host:
            raise UserError(
                f"{section}.url: expected an address such as http://localhost:8000/score, found {shown(url)}"
            )
    for header, value in source.headers.items():
        sent = header + expanded(value, f"{section}.headers.{header}")
        if not sent.isascii() or "\n" in sent:
            raise UserError(f"{section}.headers.{header}: a header is one line of ASCII, found {shown(value)}")
