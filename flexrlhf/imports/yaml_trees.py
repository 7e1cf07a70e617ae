"""YAML files of other systems: the files that they are based on, overrides, and interpolations by OmegaConf.

An interpolation without a value (of the environment, of a key that is not there) is a marked name.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import yaml

from flexrlhf.api import UserError, read_yaml
from flexrlhf.imports.settings import MARK, check_number, flat, library

Tree = dict[str, Any]
MAX_BASES = 10
"""Most files that a file is based on, one on another."""
LONGEST_EXPRESSION = 2_000
"""Characters of a text with interpolations; longer ones are marked."""
MAX_TEXT = 10_000
"""Characters that an interpolation may stand for."""
MAX_VALUES = 500
"""Values of a section that an interpolation may stand for."""
MAX_CHAIN = 100
"""Interpolations that name one another."""
LARGEST = 1e18
"""Size of numbers that functions return."""


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes numbers alone and returns one of a size that a setting may have."""

    def checked(*values: Any) -> Any:
        if not all(isinstance(value, int | float) and abs(value) < LARGEST for value in values):
            raise ValueError("expected numbers")
        return function(*values)

    return checked


_RESOLVERS = {
    "mul": _of_numbers(lambda left, right: left * right),
    "div": _of_numbers(lambda left, right: left // right if left % right == 0 else left / right),
    "add": _of_numbers(lambda *values: sum(values)),
    "sub": _of_numbers(lambda left, right: left - right),
    "max": _of_numbers(lambda *values: max(values)),
    "min": _of_numbers(lambda *values: min(values)),
    "ceil": _of_numbers(math.ceil),
    "if": lambda condition, first, second: first if condition else second,
}
"""Functions that NeMo-RL gives its YAML files."""


def read_tree(path: Path, known: dict[Path, Tree] | None = None, depth: int = 0) -> Tree:
    """Return the mapping of a file over the files that its ``defaults`` name; other names stay. Raises UserError.

    known:  files that have been read for the same one.
    """
    known = {} if known is None else known
    if (place := path.absolute()) in known:
        return known[place]
    try:
        tree = read_yaml(path.read_text(encoding="utf-8-sig"))
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping at the top")
    has_bases, bases = "defaults" in tree, tree.pop("defaults", None)
    named = [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else []
    merged: Tree = {}
    others = [base for base in named if base != "_self_"]
    for base in named:
        if isinstance(base, str) and base.endswith((".yaml", ".yml")):
            below = path.parent / base
            if depth >= MAX_BASES:
                raise UserError(f"{path}: defaults: more than {MAX_BASES} files are based on one another (MAX_BASES)")
            if not below.is_file():
                raise UserError(f"{path}: defaults: {base} is not there; copy it, too")
            merged = _over(merged, read_tree(below, known, depth + 1))
            others = [each for each in others if each != base]
    known[place] = _over(merged, tree | ({"defaults": [str(each) for each in others]} if has_bases else {}))
    return known[place]


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
    check_number(sum(1 for _ in flat(tree)))
    conf = library("omegaconf", "YAML files of other systems").OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, function in _RESOLVERS.items():
        if not conf.has_resolver(name):
            conf.register_resolver(name, function)
    plain = _without_environment(tree, given)
    try:
        config = conf.create(plain)
    except RecursionError:
        raise UserError("import: interpolations are nested more deeply than Python reads") from None
    except OmegaConfBaseException as error:
        raise UserError(f"import: an interpolation cannot be read: {str(error).splitlines()[0]}") from None
    leaves: dict[str, Any] = {}
    found = _Interpolations(conf, config, dict(flat(plain)))
    for key in found.texts:
        value = found.value(key)
        if isinstance(value, Mapping) and value:
            leaves |= {f"{key}.{inner}": each for inner, each in flat(value)}
        else:
            leaves[key] = value
    return leaves


class _Interpolations:
    """Values of a tree's leaves, each resolved once, and after the ones that it names."""

    def __init__(self, conf: Any, config: Any, texts: Mapping[str, Any]) -> None:
        self.texts, self._conf, self._config = texts, conf, config
        self._keys = sorted(texts)
        self._values: dict[str, Any] = {}
        self._begun: set[str] = set()

    def value(self, key: str) -> Any:
        """Return the value of a leaf; a mark where it has none, or more than a setting has."""
        if key not in self._values:
            self._begun.add(key)
            self._values[key] = self._resolved(key, self.texts[key])
        return self._values[key]

    def _resolved(self, key: str, value: Any) -> Any:
        from omegaconf.errors import OmegaConfBaseException

        words = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
        if not any("${" in each for each in words):
            return value
        found: Any = None
        is_known = sum(map(len, words)) <= LONGEST_EXPRESSION and len(self._begun) - len(self._values) < MAX_CHAIN
        if is_known:
            for name in {name for each in words for name in re.findall(r"[\w.]+", each)}:
                self._resolve_first(key, name)
        try:
            if is_known:
                found = self._conf.select(self._config, key, throw_on_missing=False, throw_on_resolution_failure=True)
                found = self._conf.to_container(found, resolve=True) if self._conf.is_config(found) else found
                is_known = len(found) <= MAX_TEXT if isinstance(found, str) else _num_values(found) <= MAX_VALUES
            self._conf.update(self._config, key, found if is_known else f"{MARK}{key}{MARK}", force_add=True)
        except (OmegaConfBaseException, TypeError, ValueError, ArithmeticError, LookupError, RecursionError):
            is_known = False
        return found if is_known else f"{MARK}{str(value)[:LONGEST_EXPRESSION]}{MARK}"

    def _resolve_first(self, key: str, name: str) -> None:
        """Resolve the leaves that a name in the text of a leaf may stand for, from the top or from its place."""
        ups = len(name) - len(name.lstrip("."))
        above = key.split(".")[:-ups] if ups else []
        path = ".".join([*above, name.lstrip(".")]).strip(".")
        first = bisect_left(self._keys, f"{path}.")
        below = takewhile(lambda each: each.startswith(f"{path}."), islice(self._keys, first, None))
        for each in [path] if path in self.texts else list(below) if path else ():
            if each not in self._begun:
                self.value(each)


def _num_values(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_num_values, parts))


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
