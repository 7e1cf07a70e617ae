"""Reading of a Spec from YAML files and command-line overrides, and writing. Every problem is one sentence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from flexrlhf.config.ratio_vector import RATIO_FORM
from flexrlhf.config.secrets import hidden, shown_override
from flexrlhf.config.spec import Spec
from flexrlhf.config.user_paths import instead_of
from flexrlhf.config.yaml_io import read_settings
from flexrlhf.errors import UserError, nearest, shown


def load_spec(path: str | Path, overrides: Sequence[str] = (), placement: Sequence[Any] | str | None = None) -> Spec:
    """Read a YAML file, apply ``key.sub=value`` overrides and validate. Raises UserError with one sentence.

    placement:  a vector, or its text, in the place of the file's.
    """
    return SpecFile(path).spec(overrides, placement)


class SpecFile:
    """A YAML file, read once for all specs that are made of it. Raises UserError if it is no mapping."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._raw = _read_mapping(Path(os.path.expanduser(self.path)))

    @property
    def name(self) -> str:
        """Name of its run."""
        return str(self._raw.get("name"))

    def spec(self, overrides: Sequence[str] = (), placement: Sequence[Any] | str | None = None) -> Spec:
        """Return the validated spec with ``KEY=VALUE`` ``overrides``, and ``placement`` in place of the file's."""
        raw = deepcopy(self._raw)
        scoped = [(override, *self.split_scope(override)) for override in overrides]
        applied = [(override, setting) for override, scope, setting in scoped if scope in (None, raw.get("name"))]
        for _, setting in applied:
            apply_override(raw, setting)
        if placement is not None:
            is_vector = isinstance(placement, Sequence) and not isinstance(placement, str)
            raw["placement"] = list(placement) if is_vector else placement
        return Spec.parse(raw, self.path, applied)

    def spec_on(self, nnodes: int, overrides: Sequence[str] = (), placement: Sequence[Any] | str | None = None) -> Spec:
        """Return the spec for ``nnodes`` machines: without ``cluster.nodes`` its devices are on equal nodes.

        Raises UserError as ``load_spec``, and for devices that cannot be.
        """
        spec = self.spec(overrides, placement)
        if nnodes == 1 or spec.cluster.nodes:
            return spec
        devices = spec.cluster.devices or 1
        if devices % nnodes:
            raise UserError(
                f"--nnodes {nnodes} does not divide the {devices} devices of the cluster; list its nodes in "
                f"cluster.nodes"
            )
        return self.spec([*overrides, f"cluster.nodes=[{{count: {nnodes}, devices: {devices // nnodes}}}]"], placement)

    @staticmethod
    def split_scope(override: str) -> tuple[str | None, str]:
        """Return the run's name, or None, and the setting: ``NAME:key=value`` is for the run of that name alone."""
        key, equals, value = override.partition("=")
        scope, colon, name = key.rpartition(":")
        return (scope if colon else None), name + equals + value

    @classmethod
    def check_scopes(cls, overrides: Sequence[str], names: Sequence[str]) -> None:
        """Raise UserError for an override of a run that the command does not have. ``names``: of its runs."""
        for override in overrides:
            scope, _ = cls.split_scope(override)
            if scope is not None and scope not in names:
                known = f"there are {', '.join(names)}"
                raise UserError(
                    f"--set {shown_override(override)}: no run is named {scope!r}{nearest(scope, names)}; {known}"
                )


def _read_mapping(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UserError(f"config {path}: a directory; give a YAML file")
    if not path.is_file():
        raise UserError(f"config {path}: {_no_file(path)}")
    try:
        raw = read_settings(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"config {path}: not YAML: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"config {path}: not a text file; give a YAML file") from None
    except OSError as error:
        raise UserError(f"config {path}: cannot be read ({error.strerror})") from None
    if not isinstance(raw, dict):
        kind = "a list" if isinstance(raw, list) else "nothing" if raw is None else "a single value"
        raise UserError(f"config {path}: expected a mapping at the top, found {kind}")
    return raw


def _no_file(path: Path) -> str:
    """Return why there is no file at ``path``, and the option that the word was probably written for."""
    if path.exists():
        return "a pipe or a device; give a YAML file"
    if re.match(r"[a-z_.]+=", str(path)):
        return f"no such file; a setting is given as --set {path}"
    if re.fullmatch(r"[\[\]\d.,/]+", str(path)) and not path.parent.name:
        return f"no such file; a vector is one word, without spaces or in quotes: {RATIO_FORM}"
    return f"no such file{instead_of(path, '.yaml', '.yml')}"


def program_settings(
    overrides: Sequence[str], devices: int | None, paths: Mapping[str, str | Path | None] | None = None
) -> list[str]:
    """Return the overrides that the arguments of a program's run mean. Raises UserError for other things than a list.

    devices:  number of ranks.
    paths:    directories or names of models, by role.
    """
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise UserError(f"overrides: expected a list such as ['steps=3'], found {shown(overrides)}")
    further = [f"cluster.devices={devices}"] if devices is not None else []
    return [*map(str, overrides), *_path_settings(paths or {}), *further]


def _path_settings(paths: Mapping[str, str | Path | None]) -> Iterator[str]:
    """Yield the overrides that give models these directories or names, by role (Fig. 5); JSON is YAML."""
    for role, path in paths.items():
        if path is not None:
            yield f"models.{role}.init=null"
            yield f"models.{role}.path={json.dumps(str(path))}"


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set ``a.b.c=value`` in a nested mapping; the value is read as YAML."""
    key, equals, text = override.partition("=")
    written = f"--set {shown_override(override)}"
    if not equals or not key:
        raise UserError(f"{written}: expected key=value")
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"{written}: {parent} is {shown(hidden(child, parent))}, not a mapping")
        node = child
    try:
        node[last] = read_settings(text)
    except yaml.YAMLError as error:
        raise UserError(f"{written}: the value is not YAML: {error}") from None
