"""Checks of references to a user's Python code. A file is read here, not run: it may do anything."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from flexrlhf.config.user_paths import instead_of
from flexrlhf.errors import UserError, nearest, shown

FORM = "path/to/file.py:name or module:name"


def check_function(reference: str, key: str, may_be_async: bool = False) -> None:
    """Raise UserError, for the setting ``key``, where ``reference`` names no function that could be called."""
    place, colon, name = reference.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise UserError(f"{key}: expected {FORM}, found {shown(reference)}")
    file = python_file(place, key)
    if file is not None:
        _check_defined(file, name, key, may_be_async)


def python_file(place: str, key: str) -> Path | None:
    """Return the Python file of ``place``; None for a module of another kind."""
    if not place.endswith(".py"):
        return _module_file(place, key)
    file = Path(place)
    if not file.is_file():
        raise UserError(f"{key}: no file {place}{instead_of(file, '.py')}")
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


def _check_defined(file: Path, name: str, key: str, may_be_async: bool) -> None:
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise UserError(f"{key}: {file}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{key}: {file}: no Python file: {error}") from None
    defined = dict(definitions(tree.body))
    if name not in defined and "*" not in defined:
        functions = [other for other, node in defined.items() if not isinstance(node, ast.Constant)]
        hint = nearest(name, functions) or (f"; it has {', '.join(functions[:8])}" if functions else "")
        raise UserError(f"{key}: {file} defines no {name!r}{hint}")
    if isinstance(defined.get(name), ast.Constant):
        raise UserError(f"{key}: {name!r} in {file} is a value, not a function")
    if isinstance(defined.get(name), ast.AsyncFunctionDef) and not may_be_async:
        raise UserError(f"{key}: {name!r} in {file} is async; give a plain function")


def definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names at the top of a module, in its ifs and tries too, with their nodes; ``*``: others."""
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
                yield from definitions([*inner, *handled])


def _names(target: ast.expr) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
