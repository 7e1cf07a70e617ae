"""Algorithms declare what the package reads of them: no other module asks which one it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import flexrlhf
from flexrlhf.config.algorithms import AnyAlgorithm
from flexrlhf.config.algorithms.base import AlgorithmSpec
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


@pytest.mark.parametrize("kind", get_args(AnyAlgorithm))
def test_every_algorithm_declares_what_is_read_of_it(kind: type[AlgorithmSpec]) -> None:
    source = ast.parse((ROOT / "config/algorithms/base.py").read_text())
    base = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "AlgorithmSpec")
    (block,) = (node for node in base.body if isinstance(node, ast.If))
    declared = [node.name for node in block.body if isinstance(node, ast.FunctionDef)]
    assert "temperature" in declared and not any(hasattr(AlgorithmSpec, name) for name in declared)
    missing = [name for name in declared if name not in kind.model_fields and not hasattr(kind, name)]
    assert not missing and isinstance(kind.SAMPLES, bool)
