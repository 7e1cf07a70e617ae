"""Algorithms and engines declare what the package reads of them: no other module asks which one it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

import flexrlhf
from flexrlhf.config.algorithms import AnyAlgorithm
from flexrlhf.config.algorithms.base import AlgorithmSpec
from flexrlhf.config.plugins import SHIPPED
from flexrlhf.config.strict_model import StrictModel

ROOT = Path(flexrlhf.__file__).parent


def nodes(*left_out: str) -> Iterator[tuple[str, Any]]:
    """Yield the nodes of the package's modules, with their files; ``left_out``: folders."""
    for file in sorted(ROOT.rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith(left_out):
            yield from (
                (f"{path}:{getattr(node, 'lineno', '')}", node) for node in ast.walk(ast.parse(file.read_text()))
            )


def test_no_module_asks_which_algorithm_it_has() -> None:
    kinds = {each.__name__ for kind in get_args(AnyAlgorithm) for each in kind.__mro__ if issubclass(each, StrictModel)}
    kinds -= {"StrictModel"}
    calls = (each for each in nodes("config/algorithms/") if isinstance(each[1], ast.Call))
    asked = [
        f"{place} {ast.unparse(call)}"
        for place, call in calls
        if ast.unparse(call.func) in ("isinstance", "getattr", "hasattr")
        and ("algorithm" in ast.unparse(call.args[0]).rpartition(".")[2] or ast.unparse(call.args[1]) in kinds)
    ]
    assert not asked


def test_no_module_asks_which_engine_it_has() -> None:
    """Engines of other packages have facts, and names of their own. Other systems' engines are data of ``imports``."""
    names = {*SHIPPED["engines"]}
    asked = [
        place for place, node in nodes("engines/", "imports/") if any(names & words_of(part) for part in asked_in(node))
    ]
    assert not asked


def asked_in(node: ast.AST) -> Sequence[ast.AST]:
    """Return the expressions of a node that are compared, or that facts of an engine are found by."""
    match node:
        case ast.Compare():
            return node.left, *node.comparators
        case ast.MatchValue():
            return (node.value,)
        case ast.Call(func=ast.Attribute(attr="of")) if ast.unparse(node.func) == "EngineFacts.of":
            return node.args
        case ast.Dict():
            # values that a rule compares an engine with
            pairs = zip(node.keys, node.values, strict=True)
            return [value for key, value in pairs if key is not None and ast.unparse(key) == "'engine'"]
    return ()


def words_of(expression: ast.AST) -> set[str]:
    """Return the texts in an expression, and the engine whose name it reads."""
    texts = {str(each.value) for each in ast.walk(expression) if isinstance(each, ast.Constant)}
    return texts | ({"torch"} if "TORCH.name" in ast.unparse(expression) else set())


@pytest.mark.parametrize("kind", get_args(AnyAlgorithm))
def test_every_algorithm_declares_what_is_read_of_it(kind: type[AlgorithmSpec]) -> None:
    source = ast.parse((ROOT / "config/algorithms/base.py").read_text())
    base = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "AlgorithmSpec")
    (block,) = (node for node in base.body if isinstance(node, ast.If))
    declared = [node.name for node in block.body if isinstance(node, ast.FunctionDef)]
    assert "temperature" in declared and not any(hasattr(AlgorithmSpec, name) for name in declared)
    missing = [name for name in declared if name not in kind.model_fields and not hasattr(kind, name)]
    assert not missing and isinstance(kind.SAMPLES, bool)
