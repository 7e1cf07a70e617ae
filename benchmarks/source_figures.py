"""Figures of the package's source: to compare two commits by, not limits. Printed by ``make figures``.

    python -m benchmarks.source_figures

A name counts once for each module that defines it, however many files use it: ``from a import name``, or ``a.name``. A
room is a folder of the package or a file next to them; a satellite is a room or a part of one that runs with explicit
placements do not need, and the core is the rest.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median

from flexrlhf.api import homes

ROOT = Path(__file__).parents[1]
PACKAGE = "flexrlhf"
SATELLITES = (
    *("guideline.", "imports.", "loggers.", "measure.", "report.", "verify."),
    *("engines.deepspeed.", "engines.megatron.", "engines.vllm.", "environments.packages.", "launch.ray."),
)
"""Beginnings of the names of modules that are no part of the core."""
RANK = ("launch.worker", "engines.torch.engine")
"""Modules that a rank of the torch engine begins with."""
FACE = {"api": "api/__init__.py", "api.engine": "api/engine.py"}
"""Modules that pass on names of the core, and their files."""
Functions = ast.FunctionDef | ast.AsyncFunctionDef
Imports = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class SourceFile:
    """A module.

    name:            in the package, ``room.module``
    num_lines:       all of its lines
    num_body_lines:  lines that are no docstring, comment, blank, import or signature
    function_lines:  lines of each function, with its signature and docstring
    uses:            (module, name) of each name of another module; (module, "") of an imported module itself
    """

    name: str
    num_lines: int
    num_body_lines: int
    function_lines: Sequence[int]
    uses: Set[tuple[str, str]]

    @classmethod
    def read(cls, name: str, text: str, modules: Collection[str]) -> SourceFile:
        """Return the figures of a module. ``modules``: names of all modules of the package."""
        nodes = list(ast.walk(ast.parse(text)))
        others = {line for node in nodes for line in _lines_outside_bodies(node)}
        lines = [line.strip() for line in text.splitlines()]
        return cls(
            name,
            len(lines),
            sum(bool(line) and line[0] != "#" and number not in others for number, line in enumerate(lines, 1)),
            [_last(node) - node.lineno + 1 for node in nodes if isinstance(node, Functions)],
            {(source, used) for source, used in _used_names(nodes, modules) if source != name},
        )

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @property
    def satellite(self) -> str:
        """Beginning of the satellite's name; empty for a module of the core."""
        return next((each for each in SATELLITES if f"{self.name}.".startswith(each)), "")


def _last(node: ast.stmt | ast.expr) -> int:
    assert node.end_lineno is not None, "nodes of a parsed text have an end"
    return node.end_lineno


def _lines_outside_bodies(node: ast.AST) -> range:
    if isinstance(node, Imports):
        return range(node.lineno, _last(node) + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return range(node.lineno, _last(node) + 1)
    if isinstance(node, Functions | ast.ClassDef):
        first = min(each.lineno for each in (node, *node.decorator_list))
        end = node.lineno + 1 if isinstance(node, ast.ClassDef) else max(node.lineno + 1, node.body[0].lineno)
        return range(first, end)
    return range(0)


def _used_names(nodes: Sequence[ast.AST], names: Collection[str]) -> Iterator[tuple[str, str]]:
    modules: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == PACKAGE:
            source = node.module.removeprefix(PACKAGE).lstrip(".")
            for alias in node.names:
                if (module := f"{source}.{alias.name}".lstrip(".")) in names:
                    modules[alias.asname or alias.name] = module
                    yield module, ""
                else:
                    yield source, alias.name
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def read_package() -> dict[str, SourceFile]:
    """Return all modules by name."""
    texts = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts)
        texts[name.removesuffix("__init__").rstrip(".")] = path.read_text()
    return {name: SourceFile.read(name, text, texts) for name, text in texts.items()}


@dataclass(frozen=True)
class Uses:
    """Modules that use each name: ``users`` by (module, name). A name that the face passes on is its home's."""

    files: Mapping[str, SourceFile]
    users: Mapping[tuple[str, str], frozenset[str]]

    @classmethod
    def of(cls, files: Mapping[str, SourceFile]) -> Uses:
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        names = {face: homes(str(ROOT / PACKAGE / path)) for face, path in FACE.items()}
        for file in files.values():
            for source, name in file.uses if file.name not in FACE else ():
                home = names.get(source, {}).get(name, source)
                found[home.removeprefix(f"{PACKAGE}."), name].add(file.name)
        return cls(files, {key: frozenset(users) for key, users in found.items()})

    @property
    def num_arrows(self) -> int:
        """Number of pairs of rooms of which one imports the other."""
        pairs = {
            (self.files[user].room, self.files[source].room) for (source, _), all in self.users.items() for user in all
        }
        return sum(room != other for room, other in pairs)

    def across_rooms(self, only_core: bool = False) -> str:
        """Return the number of names that files of other rooms use, and of these with a single such file."""
        counts, sources = [], set()
        for (source, name), users in self.users.items():
            file = self.files[source]
            others = [self.files[user] for user in users if self.files[user].room != file.room]
            if only_core:
                others = [] if file.satellite else [user for user in others if not user.satellite]
            if name and others:
                counts.append(len(others))
                sources.add(source)
        return f"{len(counts):,} names of {len(sources)} modules, {counts.count(1)} for one file"

    def between(self, to_core: bool) -> str:
        """Return the names of the core that satellites use, or the other way round."""
        found = [
            (source, name)
            for (source, name), users in self.users.items()
            if name and bool(self.files[source].satellite) != to_core
            if any(bool(self.files[user].satellite) == to_core for user in users)
        ]
        return f"{len(found)} names of {len({source for source, _ in found})} modules"


def size_text(files: Sequence[SourceFile]) -> str:
    """Return the number of files, of lines, and the share of bodies."""
    lines, body = sum(file.num_lines for file in files), sum(file.num_body_lines for file in files)
    return f"{len(files)} files, {lines:,} lines, {body / lines:.0%} bodies"


def functions_text(files: Sequence[SourceFile]) -> str:
    """Return the lengths of functions."""
    lengths = sorted(length for file in files for length in file.function_lines)
    return (
        f"{len(lengths):,}; median {median(lengths):g} lines, 99th percentile {lengths[int(0.99 * len(lengths))]}, "
        f"longest {lengths[-1]}"
    )


def rank_text(files: Mapping[str, SourceFile]) -> str:
    """Return the modules of the package that a rank imports when it starts."""
    for name in RANK:
        import_module(f"{PACKAGE}.{name}")
    loaded = [file for name, file in files.items() if f"{PACKAGE}.{name}".rstrip(".") in sys.modules]
    return f"{len(loaded)} modules, {sum(file.num_lines for file in loaded):,} lines"


def settings_text() -> str:
    """Return the number of settings in the reference."""
    sections = re.split(r"^## (.*)\n", (ROOT / "docs" / "reference.md").read_text(), flags=re.MULTILINE)
    settings = sections[sections.index("Settings") + 1]
    return f"{len(re.findall('^[|] `', settings, re.MULTILINE))} in {settings.count('| key |')} tables"


def main() -> None:
    files = read_package()
    every, uses = list(files.values()), Uses.of(files)
    figures = {
        "package": size_text(every),
        "core": size_text([file for file in every if not file.satellite]),
        "functions": functions_text(every),
        "rooms": f"{len({file.room for file in every} - {''})}, {uses.num_arrows} arrows between them",
        "names across rooms": uses.across_rooms(),
        "of the core alone": uses.across_rooms(only_core=True),
        "satellites use": f"{uses.between(to_core=True)} of the core",
        "the face has": " and ".join(f"{len(homes(str(ROOT / PACKAGE / path)))} names" for path in FACE.values()),
        "the core uses": f"{uses.between(to_core=False)} of satellites",
        "a rank imports": rank_text(files),
        "settings": settings_text(),
    }
    for name, text in figures.items():
        print(f"{name:<20}{text}")


if __name__ == "__main__":
    main()
