"""Arguments of config classes and trainers in a Python file, read from its syntax: nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexrlhf.api import UserError
from flexrlhf.imports.settings import MARK

MAX_DEPTH = 10
"""Names that stand for one another."""
MAX_VALUES = 10_000
"""Expressions that are read; others are marked."""
LONGEST_EXPRESSION = 60
"""Characters of an expression that is not known."""


class PythonFile:
    """Calls of a Python file, with the constants that its names stand for.

    docstrings:  texts that stand alone, such as commands in the file's description.
    """

    def __init__(self, path: Path, text: str) -> None:
        try:
            self._tree = ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"import {path}: not Python ({error})") from None
        except (RecursionError, MemoryError):
            raise UserError(f"import {path}: nested more deeply than Python reads") from None
        self._lines, self._read = text.splitlines(), 0
        self._constants, self._defaults = dict(self._assigned()), dict(self._options())
        self.docstrings = [
            node.value.value
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]

    def _assigned(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield names and what they are assigned, but for names that are assigned several times."""
        pairs = []
        for node in ast.walk(self._tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                pairs += [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
        number = Counter(name for name, _ in pairs)
        yield from ((name, value) for name, value in pairs if number[name] == 1)

    def calls(self, pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names of called classes and functions that match, with their arguments; the first one by position
        is the argument ``""``."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if re.fullmatch(pattern, name):
                    first = {"": self._value(node.args[0])} if node.args else {}
                    whole = [self._value(each.value) for each in node.keywords if each.arg is None]
                    named = {key: value for each in whole if isinstance(each, dict) for key, value in each.items()}
                    yield (
                        name,
                        first | named | {each.arg: self._value(each.value) for each in node.keywords if each.arg},
                    )

    def names(self, pattern: str) -> list[str]:
        """Return the names in the file that match, in order."""
        found = (node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))
        return [name for name in found if re.fullmatch(pattern, name)]

    def _options(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield the options of argparse and their defaults."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args:
                name = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                for each in node.keywords:
                    if each.arg == "default" and isinstance(name, str):
                        yield name.lstrip("-").replace("-", "_"), each.value

    def _value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression of constants, names, options and names of models; a marked text for
        another."""
        self._read += 1
        if depth < MAX_DEPTH and self._read < MAX_VALUES:
            match node:
                case ast.Name(id=name) if name in self._constants:
                    return self._value(self._constants[name], depth + 1)
                case ast.Attribute(value=ast.Name(), attr=name) if name in self._defaults:
                    return self._value(self._defaults[name], depth + 1)
                case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[model, *_]):
                    return self._value(model, depth + 1)
                case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words):
                    return {each.arg: self._value(each.value, depth + 1) for each in words if each.arg}
                case ast.List(elts=elements) | ast.Tuple(elts=elements):
                    return [self._value(each, depth + 1) for each in elements]
        try:
            return _without_mark(ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            lines = self._lines[node.lineno - 1 : node.end_lineno]
            lines[-1] = lines[-1][: node.end_col_offset]
            return f"{MARK}{' '.join(lines)[node.col_offset :][:LONGEST_EXPRESSION]}{MARK}"


def _without_mark(value: Any) -> Any:
    """Return a value whose texts have no character that stands for a mark."""
    if isinstance(value, dict):
        return {_without_mark(key): _without_mark(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_without_mark(each) for each in value]
    return value.replace(MARK, "") if isinstance(value, str) else value
