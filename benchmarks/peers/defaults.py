"""Defaults of the presets, looked up in the packages: in configs, in dataclasses, in arguments of scripts."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
import yaml

from flexrlhf.config.presets.filling import PEERS
from flexrlhf.config.presets.table import Cell, MiniBatchesOf, WarmUp

LOOKED_UP = ("verl", "openrlhf", "trl")
"""Presets whose packages are installed."""
EARLIER = "trl-1.9.0/"
"""Folder of sources of an earlier release: TRL has had no PPO since, and its preset for PPO keeps that release's."""
SECTIONS = {"actor.": "actor_rollout_ref.actor.", "rollout.": "actor_rollout_ref.rollout."}
"""Short and full names in verl's config."""
SAME: tuple[tuple[Any, Any], ...] = (
    (0, -1),
    (0.0, None),
    (None, False),
    ("none", None),
    ("none", False),
    ("sigmoid", False),
    ("cosine", "cosine_with_min_lr"),
    ("group", True),
    ("adamw", "AdamW"),
    ("adamw", "adam"),
    ("adamw", "adamw_torch_fused"),
    ("token-mean", "dapo"),
    (1, None),
    (None, 0.0),
    (None, "off"),
    ("token", "vanilla"),
    ("token", "ppo"),
    (10.0, (-10, 10)),
)
"""Value here, value there: the same in other words."""


def print_defaults(directory: Path) -> None:
    """Print for each preset how many cells the package confirms, and the cells that are read from code by eye.

    Raises SystemExit for a cell whose file the package does not have, and for one with another value there.
    """
    print(
        "\n### Defaults of presets, looked up in the packages\n\n"
        "| preset | cells | confirmed | read from code |\n|---|---|---|---|"
    )
    unlike: list[str] = []
    for like in LOOKED_UP:
        trainers = PEERS[like].trainers.values()
        further = (trainer.routers for trainer in trainers if trainer.routers is not None)
        cells = dict.fromkeys(cell for trainer in trainers for cell in _plain(trainer.cells))
        for cell in further:
            _file(directory, cell.source.partition(": ")[0])
        found = {cell: list(_values(directory, cell)) for cell in cells}
        confirmed = [
            cell for cell, values in found.items() if values and all(_same(cell.value, each) for each in values)
        ]
        unlike += [
            f"{like} {cell.key} {cell.value}: {values} ({cell.source})"
            for cell, values in found.items()
            if values and cell not in confirmed
        ]
        by_eye = sum(not values for values in found.values())
        print(f"| {PEERS[like].title} | {len(cells)} | {len(confirmed)} | {by_eye} |")
    print("\nOther values there:", *(unlike or ["none"]), sep="\n- ")
    if unlike:
        raise SystemExit(f"{len(unlike)} cells have other values in the packages")


def _plain(cells: tuple[Cell, ...]) -> Iterator[Cell]:
    """Yield cells whose values can be compared: no mappings."""
    for cell in cells:
        if not isinstance(cell.value, Mapping):
            yield cell


def _values(directory: Path, cell: Cell) -> Iterator[Any]:
    """Yield the values that the source of a cell has for its names; none if they are no settings."""
    file, _, text = cell.source.partition(": ")
    names = [name.partition(":")[0].partition(" ")[0] for name in text.split(", ")]
    known = _file(directory, file)
    values = [known[name] for name in names if name in known]
    if len(values) == 2 and cell.key.endswith("betas"):
        values = [tuple(values)]
    yield from values


def _file(directory: Path, file: str) -> dict[str, Any]:
    """Return the defaults of a file by name; none of an earlier release's. Raises SystemExit for a file that is not
    there."""
    if file.startswith(EARLIER):
        return {}
    if file.startswith("transformers/"):
        return {name: each.default for name, each in transformers.TrainingArguments.__dataclass_fields__.items()}
    path = directory / file
    if not path.is_file():
        raise SystemExit(f"{path} is not there, which is the source of a preset's cells: the release is another one")
    if path.suffix == ".yaml":
        return dict(_flat(yaml.safe_load(path.read_text())))
    return dict(_of_code(ast.parse(path.read_text())))


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        for short, full in SECTIONS.items():
            if name.startswith(full):
                yield short + name.removeprefix(full), _plain_number(value)
        yield name, _plain_number(value)
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")


def _plain_number(value: Any) -> Any:
    """Return 1e-3, which YAML 1.1 reads as a text, as a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _of_code(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the defaults of dataclass fields and of ``add_argument`` calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            yield from _default(node.target.id, node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for argument in node.args:
                for name in _names(argument):
                    yield from _default(name, node)


def _names(argument: ast.expr) -> Iterator[str]:
    """Yield the names of an argument; ``{prefix}`` is replaced by actor and critic."""
    if isinstance(argument, ast.Constant):
        yield str(argument.value).lstrip("-")
    if isinstance(argument, ast.JoinedStr):
        yield "".join(str(part.value) for part in argument.values if isinstance(part, ast.Constant)).lstrip("-.")


def _default(name: str, call: ast.Call) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        if keyword.arg == "default":
            try:
                yield name, ast.literal_eval(keyword.value)
            except ValueError:
                continue


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, MiniBatchesOf):
        return bool(here.size == there)
    if isinstance(here, WarmUp):
        return there in (here.share, here.steps)
    if isinstance(here, tuple):
        return tuple(here) == tuple(there)
    return bool(here == there) or (here, there) in [(a, b) for a, b in SAME if type(b) is type(there)]
