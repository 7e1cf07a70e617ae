"""From YAML files and command-line overrides to a Spec, and back. Every problem is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flexrlhf.errors import UserError, nearest
from flexrlhf.spec import ALGORITHMS, PlacementMap, Spec
from flexrlhf.yaml12 import read_yaml, write_yaml


def load_spec(path: str | Path, overrides: tuple[str, ...] = ()) -> Spec:
    """Read a YAML file, apply ``key.sub=value`` overrides and validate. Raises UserError in one sentence."""
    path = Path(path)
    if not path.is_file():
        found = [str(other) for other in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise UserError(f"config {path}: no such file{nearest(str(path), found)}")
    try:
        raw = read_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"config {path}: expected a mapping at the top, found {type(raw).__name__}")
    for override in overrides:
        scope, setting = split_scope(override)
        if scope in (None, raw.get("name")):
            apply_override(raw, setting)
    return parse_spec(raw, str(path))


def split_scope(override: str) -> tuple[str | None, str]:
    """``NAME:key=value`` is for the run of that name alone."""
    key, equals, value = override.partition("=")
    scope, colon, name = key.rpartition(":")
    return (scope if colon else None), name + equals + value


def check_scopes(overrides: tuple[str, ...], specs: list[Spec]) -> None:
    """Raise UserError for an override that is for a run which the command does not have."""
    names = [spec.name for spec in specs]
    for override in overrides:
        scope, _ = split_scope(override)
        if scope is not None and scope not in names:
            raise UserError(
                f"--set {override}: no run is named {scope!r}{nearest(scope, names)}; there are {', '.join(names)}"
            )


def parse_vector(text: str) -> list[Any]:
    """Read ``[1,1,0.5,0.5]``; its numbers are checked with the spec."""
    try:
        vector = read_yaml(text)
    except yaml.YAMLError:
        vector = None
    if not isinstance(vector, list):
        raise UserError(f"--placement-ratio {text}: expected a vector such as [1,1,0.5,0.5]")
    return vector


def parse_spec(raw: dict[str, Any], origin: str = "config") -> Spec:
    """Validate a mapping. The first problem is reported as one UserError sentence."""
    try:
        return Spec.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error)}") from None


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set ``a.b.c=value`` in a nested mapping; the value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override}: expected key=value")
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {override}: {parent} is {child!r}, not a mapping")
        node = child
    try:
        node[last] = read_yaml(text)
    except yaml.YAMLError:
        raise UserError(f"--set {override}: the value is not YAML") from None


def dump_spec(spec: Spec) -> str:
    """The resolved YAML: loading it gives the same spec."""
    raw = spec.model_dump(mode="json", by_alias=True)
    if isinstance(spec.placement, PlacementMap):
        raw["placement"] = {**raw["placement"].pop("models"), **raw["placement"]}
    return write_yaml(raw)


def _first_problem(error: ValidationError) -> str:
    """One sentence for the first problem: the dotted key, what is wrong, what was found."""
    problems = error.errors(include_url=False)
    problem = max(problems, key=lambda item: ("unknown key" in item["msg"], len(item["loc"])))
    parts = [str(part) for part in problem["loc"] if not str(part).startswith(("literal[", "tuple[", "function-"))]
    if parts[:1] == ["algorithm"] and len(parts) > 1 and parts[1] in ALGORITHMS:
        del parts[1]
    if parts[:1] == ["placement"]:
        parts = [
            part
            for part in parts
            if part not in {"PlacementMap", "models"} and not part.startswith(("tuple[", "function-"))
        ]
    if problem["type"] == "union_tag_invalid":
        name = str(problem["input"].get("name"))
        return f"algorithm.name: unknown algorithm {name!r}{nearest(name, ALGORITHMS)}; known: {', '.join(ALGORITHMS)}"
    message = problem["msg"].removeprefix("Value error, ")
    where = ".".join(parts)
    shown = "" if problem["type"] in {"value_error", "missing"} else f", found {problem['input']!r}"
    return f"{where}: {message}{shown}" if where else f"{message}{shown}"
