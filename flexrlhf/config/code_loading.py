"""Loading of a user's Python code. Processes that call it load nothing but the standard library."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from flexrlhf.errors import UserError


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a Python process that runs ``module``, as any that this package starts.

    It finds no module in the current directory: a yaml.py there would run in place of the library.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def load_function(reference: str) -> Callable[..., Any]:
    """Load ``path/to/file.py:name`` or ``module:name``.

    Of a script that makes a trainer, as TRL's have them, what the function needs is run and nothing else: it would
    train.
    """
    place, _, name = reference.rpartition(":")
    needed = _needed_of_script(Path(place), name) if place.endswith(".py") else None
    module = load_module(place) if needed is None else _part_of_script(Path(place).resolve(), needed)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _needed_of_script(file: Path, name: str) -> list[ast.stmt] | None:
    """Return the statements of a script that define ``name`` and what it refers to; None for another file."""
    tree = ast.parse(file.read_bytes())
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    if not any(getattr(each, "id", getattr(each, "attr", "")).endswith("Trainer") for each in calls):
        return None
    needed: list[ast.stmt] = []
    pending = [name]
    while pending:
        wanted = pending.pop()
        for statement in tree.body:
            if statement not in needed and wanted in _names_defined(statement):
                needed.append(statement)
                pending += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return [each for each in tree.body if each in needed or _is_future(each)]


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _names_defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a file defines; none of one that may do anything."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.Try() | ast.If():
            return {name for inner in statement.body for name in _names_defined(inner)}
    return set()


def _part_of_script(file: Path, statements: list[ast.stmt]) -> ModuleType:
    """Run statements of a file as a module; modules in its folder are found."""
    _find_modules_in(os.getcwd())
    _find_modules_in(str(file.parent))
    module = ModuleType(f"flexrlhf_user_{file.stem}")
    module.__file__ = str(file)
    exec(compile(ast.Module(statements, []), str(file), "exec"), module.__dict__)
    return module


def load_module(place: str) -> ModuleType:
    """Load a file, again if it has changed since, or a module; modules are found in the working directory, too."""
    _find_modules_in(os.getcwd())
    if not place.endswith(".py"):
        return importlib.import_module(place)
    return _module_of_file(Path(place).resolve(), changed_ns(place))


def changed_ns(place: str) -> int:
    """Return when a file was written; 0 for a module, which is loaded once."""
    return Path(place).stat().st_mtime_ns if place.endswith(".py") else 0


@functools.cache
def _module_of_file(file: Path, _: int) -> ModuleType:
    """Load a file as a script is: modules in its folder are found."""
    name = _name_of(file)
    _find_modules_in(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file}: no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _find_modules_in(folder: str) -> None:
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def _name_of(file: Path) -> str:
    """Return a module name for ``file``: its own where that is free, else one that no other module has.

    Processes that the user's code starts look for its functions by the module's name.
    """
    is_taken = not file.stem.isidentifier() or file.stem in sys.modules
    spec = None if is_taken else importlib.util.find_spec(file.stem)
    is_other = spec is not None and (spec.origin is None or Path(spec.origin).resolve() != file)
    return f"flexrlhf_user_{file.stem}" if is_taken or is_other else file.stem


def line_of(error: BaseException) -> str:
    """Return the last line of the traceback of ``error``, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
    return f"{text:.300}{where}"


class NamedErrors:
    """Context in which an error of a user's code becomes one sentence with file and line, after the ``name`` of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and not isinstance(error, UserError | KeyboardInterrupt):
            raise UserError(f"{self._name} raised {line_of(error)}") from error
