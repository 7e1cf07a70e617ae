"""YAML files of other systems: the files that they are based on, overrides, and interpolations by OmegaConf.

An interpolation without a value (of the environment, of a key that is not there) is a marked name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flexrlhf.config.yaml_io import explain, read_yaml
from flexrlhf.errors import UserError
from flexrlhf.imports.libraries import omega_conf
from flexrlhf.imports.settings import MARK, flat

Tree = dict[str, Any]
MAX_BASES = 10
"""Most files that a file is based on, one on another."""
_RESOLVERS = {
    "mul": lambda left, right: left * right,
    "div": lambda left, right: left // right if left % right == 0 else left / right,
    "add": lambda *values: sum(values),
    "sub": lambda left, right: left - right,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "ceil": math.ceil,
    "if": lambda condition, first, second: first if condition else second,
}
"""Functions that NeMo-RL gives its YAML files."""


def read_tree(path: Path, depth: int = 0) -> Tree:
    """Return the mapping of a file over the files that its ``defaults`` name. Raises UserError."""
    try:
        tree = read_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {explain(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping at the top")
    bases = tree.pop("defaults", None)
    named = [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []
    merged: Tree = {}
    for base in named:
        if isinstance(base, str) and base.endswith((".yaml", ".yml")):
            below = path.parent / base
            if depth >= MAX_BASES or not below.is_file():
                raise UserError(f"{path}: defaults: {base} is not there; copy it, too")
            merged = _over(merged, read_tree(below, depth + 1))
    return _over(merged, tree)


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> Tree:
    merged = dict(base)
    for key, value in own.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def with_overrides(tree: Tree, overrides: Mapping[str, Any]) -> Tree:
    """Return a tree with dotted keys set."""
    for key, value in overrides.items():
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        tree = _over(tree, nested)
    return tree


def resolved(tree: Tree, given: Mapping[str, str]) -> dict[str, Any]:
    """Return the leaves by dotted key, with interpolations resolved. ``given``: variables of the environment."""
    conf = omega_conf()
    from omegaconf.errors import OmegaConfBaseException

    for name, function in _RESOLVERS.items():
        if not conf.has_resolver(name):
            conf.register_resolver(name, function)
    plain = _without_environment(tree, given)
    try:
        config = conf.create(plain)
    except OmegaConfBaseException as error:
        raise UserError(f"import: an interpolation cannot be read: {str(error).splitlines()[0]}") from None
    leaves: dict[str, Any] = {}
    for key, value in flat(plain):
        texts = value if isinstance(value, list) else [value]
        if not any(isinstance(each, str) and "${" in each for each in texts):
            leaves[key] = value
            continue
        try:
            found = conf.select(config, key, throw_on_missing=False, throw_on_resolution_failure=True)
            found = conf.to_container(found, resolve=True) if conf.is_config(found) else found
        except (OmegaConfBaseException, TypeError, ValueError, ZeroDivisionError):
            leaves[key] = f"{MARK}{value}{MARK}"
            continue
        if isinstance(found, Mapping):
            leaves |= {f"{key}.{inner}": each for inner, each in flat(found)}
        else:
            leaves[key] = found
    return leaves


def referenced(tree: Any) -> set[str]:
    """Return the keys that interpolations name."""
    if isinstance(tree, dict | list):
        parts = tree.values() if isinstance(tree, dict) else tree
        return {key for part in parts for key in referenced(part)}
    return set(re.findall(r"\$\{([\w.]+)\}", tree)) if isinstance(tree, str) else set()


def _without_environment(value: Any, given: Mapping[str, str]) -> Any:
    """Return a tree with variables of the environment replaced by given values, defaults or marks."""
    if isinstance(value, dict):
        return {str(key): _without_environment(each, given) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_environment(each, given) for each in value]
    if not isinstance(value, str):
        return value

    def found(match: re.Match[str]) -> str:
        name, default = match[1].strip(), match[2]
        return given.get(name) or (f"{MARK}{name}{MARK}" if default is None else default.strip().strip("'\""))

    return re.sub(r"\$\{oc\.env:([^,}]+)(?:,([^{}]*))?\}", found, value)
