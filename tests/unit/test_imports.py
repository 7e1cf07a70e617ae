"""Scripts that tests and people start import names that exist: no test collects a script before it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file for folder in ("tests", "benchmarks", "docs") for file in (ROOT / folder).rglob("*.py"))


@cache
def defined(file: Path) -> set[str]:
    """Names that a module defines or imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found.update((alias.asname or alias.name).partition(".")[0] for alias in aliases)
    return found


def missing(source: str) -> Iterator[str]:
    """Imports of this repository's packages that do not resolve."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("flexrlhf.", "benchmarks.")):
            folder = ROOT.joinpath(*node.module.split("."))
            file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            known = defined(file) if file.is_file() else set()
            known |= {each.stem for each in folder.glob("*")} if folder.is_dir() else set()
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known)


def test_imports_resolve() -> None:
    found = {str(file.relative_to(ROOT)): list(missing(file.read_text())) for file in SCRIPTS}
    assert len(found) > 100 and {file: names for file, names in found.items() if names} == {}


def test_a_missing_name_is_found() -> None:
    assert list(missing("from flexrlhf.placement.layout import Layout, Nothing")) == [
        "flexrlhf.placement.layout.Nothing"
    ]
    assert list(missing("from flexrlhf.nowhere import Layout")) == ["flexrlhf.nowhere.Layout"]
