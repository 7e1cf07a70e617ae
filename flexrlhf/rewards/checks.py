"""Checks of the sources of scores before a run starts. A user's file is read here, not run: it may do anything."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flexrlhf.config.reward_sources import FunctionSource, RewardSource, RuleSource, ServiceSource
from flexrlhf.config.secrets import expanded, expanded_url
from flexrlhf.errors import UserError, nearest, shown
from flexrlhf.rewards.signatures import FORMS, form_of, required_columns

FORM = "path/to/file.py:name or module:name"
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
                _check_function(source.function, f"{section}.function")
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
    """Return the columns that a function cannot be called without; none where its parameters are not certain."""
    own = OWN_COLUMNS if source.separator is None else (*OWN_COLUMNS, "steps")
    place, _, name = source.function.rpartition(":")
    file = _file(place, "function")
    signature = _signature(ast.parse(file.read_bytes()), name) if file else None
    form = None if signature is None else form_of(signature)
    if signature is None or form is None:
        return []
    return [column for column in required_columns(signature, form) if column not in own]


def _signature(module: ast.Module, name: str) -> inspect.Signature | None:
    """Return the signature of a function; None where a decorator or a second ``def`` may change it."""
    match [node for other, node in _defined(module.body) if other == name]:
        case [ast.FunctionDef(args=parameters, decorator_list=[])]:
            return inspect.Signature(list(_parameters(parameters)))
    return None


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a ``def``. A default is None here, whatever it is."""
    kinds = inspect.Parameter
    first_named = len(arguments.posonlyargs)
    by_place = [*arguments.posonlyargs, *arguments.args]
    first_default = len(by_place) - len(arguments.defaults)
    for place, one in enumerate(by_place):
        kind = kinds.POSITIONAL_ONLY if place < first_named else kinds.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(one.arg, kind, default=kinds.empty if place < first_default else None)
    if arguments.vararg is not None:
        yield inspect.Parameter(arguments.vararg.arg, kinds.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield inspect.Parameter(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
    if arguments.kwarg is not None:
        yield inspect.Parameter(arguments.kwarg.arg, kinds.VAR_KEYWORD)


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


def _check_function(reference: str, key: str) -> None:
    place, colon, name = reference.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise UserError(f"{key}: expected {FORM}, found {shown(reference)}")
    file = _file(place, key)
    if file is not None:
        _check_defined(file, name, key)


def _file(place: str, key: str) -> Path | None:
    """Return the Python file of ``place``; None for a module of another kind."""
    if not place.endswith(".py"):
        return _module_file(place, key)
    file = Path(place)
    if not file.is_file():
        others = [str(other) for other in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise UserError(f"{key}: no file {place}{nearest(place, others)}")
    return file


def _module_file(module: str, key: str) -> Path | None:
    """Return the file that a worker would load a module from; nothing of it is loaded."""
    places: list[str] | None = [os.getcwd(), *sys.path]
    parts = module.split(".")
    spec: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), places) if places else None
        if spec is None:
            raise UserError(f"{key}: no module {'.'.join(parts[:depth])!r}; a file is named as path/to/file.py:name")
        places = spec.submodule_search_locations
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(spec.origin) if is_source and spec is not None and spec.origin is not None else None


def _check_defined(file: Path, name: str, key: str) -> None:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise UserError(f"{key}: {file}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{key}: {file}: no Python file: {error}") from None
    defined = dict(_defined(tree.body))
    if name not in defined and "*" not in defined:
        functions = [other for other, node in defined.items() if not isinstance(node, ast.Constant)]
        hint = nearest(name, functions) or (f"; it has {', '.join(functions[:8])}" if functions else "")
        raise UserError(f"{key}: {file} defines no {name!r}{hint}")
    if isinstance(defined.get(name), ast.Constant):
        raise UserError(f"{key}: {name!r} in {file} is a value, not a function")
    if isinstance(defined.get(name), ast.AsyncFunctionDef):
        raise UserError(f"{key}: {name!r} in {file} is async; give a plain function")
    signature = _signature(tree, name)
    if signature is not None and form_of(signature) is None:
        raise UserError(f"{key}: {name}{_shown(signature)} in {file} is neither {FORMS}")


def _shown(signature: inspect.Signature) -> str:
    """Return the names of the parameters, as a ``def`` has them."""
    return f"({', '.join(str(one).partition('=')[0] for one in signature.parameters.values())})"


def _defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names at the top of a module, in its ifs and tries too, with what they are bound to; ``*``: others."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, statement
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name.partition(".")[0], statement) for alias in names)
            case ast.Assign(targets=targets, value=value):
                yield from ((name, value) for target in targets for name in _names(target))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from ((name, value) for name in _names(target))
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
                handled = [child for handler in getattr(statement, "handlers", ()) for child in handler.body]
                yield from _defined([*inner, *handled])


def _names(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
