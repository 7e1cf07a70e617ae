"""Fingerprints of a run's inputs: digests of the files that it reads, and versions of the libraries that it needs.

Two machines with the same ones compute with the same weights and rows.
"""

from __future__ import annotations

import ast
import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from os.path import realpath
from pathlib import Path

from packaging.requirements import Requirement

from flexrlhf.config.code_checks import python_file
from flexrlhf.config.engines import PEFT, EngineFacts
from flexrlhf.config.plugins import Plugin
from flexrlhf.config.reward_sources import FunctionSource
from flexrlhf.config.spec import Spec
from flexrlhf.data.reasoning_tasks import is_task
from flexrlhf.errors import UserError
from flexrlhf.plan.plan import Plan

READ_SUFFIXES = frozenset({".json", ".jinja", ".model", ".py", ".safetensors", ".txt"})
"""Endings of the files of a model's directory that models and tokenizers are read from."""
BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 64
"""Parts of a larger file that are read: all weights of a model differ after one update."""
_DIGITS = 12
_PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("flexrlhf", "torch", "transformers", "tokenizers", "safetensors", "peft", "reasoning-gym")
"""Libraries whose versions are recorded, next to those of engines."""


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of the runs of a command.

    plans:  of the runs, in order.
    """

    plans: Sequence[Plan]

    def inputs(self) -> dict[str, str]:
        """Return the digest of each file that the runs read, by its setting and path.

        A file that an earlier run of the command writes has none, since it does not exist yet. Raises UserError for a
        Python file that is not there.
        """
        found: dict[str, str] = {}
        for index, plan in enumerate(self.plans):
            written = [other.spec.directory for other in self.plans[:index]]
            for setting, path in _inputs(plan):
                place = Path(realpath(path))
                if not _is_below(path, written):
                    found |= {f"{setting} {_name(path, file)}": file_digest(file) for file in _files(place)}
        return found

    def fixed(self) -> dict[str, str]:
        """Return the digest of each file that a resumed run reads as its first part did, by its setting and name.

        Versions of plug-ins are among them; rows of the data are not: a checkpoint has a digest of the examples.
        """
        found: dict[str, str] = {}
        for plan in self.plans:
            found |= used_plugins(plan)
            for setting, path in (*_models(plan), *_code(plan)):
                found |= {f"{setting} {file.name}": file_digest(file) for file in _files(Path(realpath(path)))}
        return found

    def requirements(self) -> list[Requirement] | None:
        """Return the requirements of this package's metadata that the runs need; None if it is not installed."""
        declared = _declared_requirements()
        return None if declared is None else needed_libraries(needed_extras(self.plans), declared)

    def versions(self) -> dict[str, str]:
        """Return the versions of Python, this package and the libraries that the runs need."""
        names = {"python", "flexrlhf"} | {each.name for each in self.requirements() or []}
        names |= {build for name, build in EngineFacts.cpu_builds().items() if name in names}
        found = {name: found for name, found in library_versions().items() if name in names}
        return found | {name: text for plan in self.plans for name, text in used_plugins(plan).items()}

    @staticmethod
    def sources() -> dict[str, str]:
        """Return the digest of each file of this package."""
        return {str(file.relative_to(_PACKAGE)): file_digest(file) for file in sorted(_PACKAGE.rglob("*.py"))}


def written_inputs(spec: Spec, earlier: Sequence[Path]) -> list[Path]:
    """Return the directories of models and of the tokenizer of a run that are below the directories ``earlier``."""
    names = [*(model.path for _, model in spec.models if model is not None), spec.data.tokenizer]
    return list(dict.fromkeys(Path(name) for name in names if name is not None and _is_below(name, earlier)))


def _is_below(path: str, directories: Sequence[Path]) -> bool:
    return any(Path(realpath(path)).is_relative_to(realpath(each)) for each in directories)


def file_digest(path: Path) -> str:
    """Return a digest of a file's size and bytes; of a file of more than 64 MiB the bytes of 64 blocks."""
    digest, size = hashlib.sha256(), path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= NUM_BLOCKS * BLOCK_BYTES:
            digest.update(file.read())
        else:
            for block in range(NUM_BLOCKS):
                file.seek((size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:_DIGITS]


def _inputs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield setting and path of what a run reads."""
    yield from _models(plan)
    yield from ((source.setting, source.path) for source in plan.data.sources)
    yield from _code(plan)


def _models(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield setting and path of the models, the tokenizer and the chat template of a run."""
    for role in plan.graph.roles:
        if (path := plan.model(role).path) is not None:
            yield f"models.{role}.path", path
    data = plan.spec.data
    for setting, name in (("data.tokenizer", data.tokenizer), ("data.chat_template", data.chat_template)):
        if name is not None:
            yield setting, name


def _code(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield setting and path of a user's Python files, with the files next to them that they import."""
    spec = plan.spec
    references = [("algorithm.graph", spec.algorithm.graph), ("algorithm.loop", spec.algorithm.loop)]
    references += [(f"algorithm.protocols.{name}", reference) for name, reference in spec.algorithm.protocols.items()]
    for section, sources in (("reward", spec.reward), ("cost", spec.cost)):
        references += [
            (f"{section}.function", source.function) for source in sources or () if isinstance(source, FunctionSource)
        ]
    for setting, reference in references:
        for each in FunctionFiles(reference or "", setting).paths:
            yield setting, str(each)


@dataclass(frozen=True)
class FunctionFiles:
    """Python files that a user's function comes from.

    reference:  ``path/to/file.py:name`` or ``module:name``.
    setting:    with the reference, for messages.
    """

    reference: str
    setting: str

    @property
    def paths(self) -> list[Path]:
        """The file with the function, and files next to it that it imports. Raises UserError without the file."""
        place, colon, _ = self.reference.rpartition(":")
        file = python_file(place, self.setting) if colon else None
        return [] if file is None else _with_imported(file)

    def digests(self) -> dict[str, str]:
        """Return the digest of each file. Raises UserError without the file."""
        return {str(file): file_digest(file) for file in self.paths}

    def check(self, expected: Mapping[str, str], where: str) -> None:
        """Raise UserError if files are others here than on the machine of ``expected`` digests. ``where``: name of this
        machine, for the sentence.
        """
        own = self.digests()
        for file in {**expected, **own}:
            if own.get(file) != expected.get(file):
                raise UserError(
                    f"{self.setting}: {file} of {where} is not the one of the program; copy it to all machines"
                )


def _with_imported(file: Path) -> list[Path]:
    """Return a Python file and the files of its directory that it imports, also through each other."""
    found: dict[Path, None] = {}
    pending = [file]
    while pending:
        each = pending.pop()
        if each not in found:
            found[each] = None
            for base in _imports(each, file.parent):
                places = base.parent / f"{base.name}.py", base / "__init__.py"
                pending += [path for path in places if path.is_file()]
    return sorted(found)


def _imports(file: Path, root: Path) -> Iterator[Path]:
    """Yield the places, without an ending, at which the modules that ``file`` imports would be below ``root``."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(root, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else root
            module = [node.module] if node.module else []
            names = [(base, ".".join([*module, *end])) for end in [[], *([alias.name] for alias in node.names)]]
        else:
            continue
        for base, name in names:
            parts = name.split(".")
            yield from (base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1))


def _files(place: Path) -> list[Path]:
    """Return the file, or the files of a directory that are read."""
    if place.is_dir():
        return sorted(each for each in place.iterdir() if each.suffix in READ_SUFFIXES and each.is_file())
    return [place] if place.is_file() else []


def _name(path: str, file: Path) -> str:
    return path if Path(realpath(path)) == file else str(Path(path) / file.name)


def library_versions() -> dict[str, str]:
    """Return the version of each package of ``LIBRARIES`` and of engines that is installed, and of Python."""
    builds = EngineFacts.cpu_builds()
    names = (
        *LIBRARIES,
        *(facts.package.name for facts in EngineFacts.all_engines() if facts.package),
        *builds.values(),
    )
    installed = {name: found for name in names if (found := _version(name)) is not None}
    return {"python": platform.python_version(), **installed}


def needed_extras(plans: Iterable[Plan]) -> list[str]:
    """Return the extras of this package that the engines, adapters and generated rows of ``plans`` need."""
    extras: dict[str, None] = {}
    for plan in plans:
        for model in plan.placement.models:
            package = model.facts.package
            if package is not None:
                extras[package.extra] = None
            if model.settings.lora is not None:
                extras[PEFT.extra] = None
        if any(is_task(source.path) for source in plan.data.sources):
            extras["reasoning"] = None
    return list(extras)


def needed_libraries(extras: Sequence[str], declared: Sequence[str]) -> list[Requirement]:
    """Return the requirements among ``declared``, as of package metadata, that hold with ``extras``."""
    found = [Requirement(line) for line in declared]
    environments = [{"extra": extra} for extra in ("", *extras)]
    return [each for each in found if each.marker is None or any(map(each.marker.evaluate, environments))]


def used_plugins(plan: Plan) -> dict[str, str]:
    """Return package and version of the plug-ins of other packages that a run uses, by group and name."""
    spec, references = plan.spec, set()
    for source in (*(spec.reward or ()), *(spec.cost or ())):
        references |= {("rewards", source.function)} if isinstance(source, FunctionSource) else set()
    if spec.environment is not None and spec.environment.path is not None:
        references.add(("environments", spec.environment.path))
    named = [
        Plugin.find("algorithms", spec.algorithm.name),
        *(Plugin.find("engines", model.engine) for model in plan.placement.models),
        *(Plugin.find("loggers", each.name) for each in spec.loggers),
        *(each for group in ("rewards", "environments") for each in Plugin.of_group(group).values()),
    ]
    return {
        each.title: f"{each.package} {each.version}"
        for each in named
        if each is not None and not each.is_ours
        if each.group not in ("rewards", "environments") or (each.group, each.reference) in references
    }


def _declared_requirements() -> list[str] | None:
    try:
        return requires("flexrlhf") or []
    except PackageNotFoundError:
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
