"""Reading of a Spec from YAML files and command-line overrides, and writing. Every problem is one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.model_settings import PASS_SETTINGS, ModelSpec, ModelsSpec, OptimizerSpec
from flexrlhf.config.placement_settings import PlacementMap
from flexrlhf.config.plugins import plugins
from flexrlhf.config.presets.filling import trained_roles
from flexrlhf.config.ratio_vector import RATIO_FORM
from flexrlhf.config.reward_sources import KINDS
from flexrlhf.config.secrets import hidden, shown_override, without_secrets
from flexrlhf.config.spec import Spec
from flexrlhf.config.strict_model import StrictModel, mappings
from flexrlhf.config.user_paths import in_home, instead_of, is_yaml
from flexrlhf.config.yaml_io import explain, read_settings, write_yaml
from flexrlhf.errors import UserError, either, nearest, shown

_CLASS_NAMES = {"PlacementMap"} | {kind.__name__ for kind in StrictModel.__subclasses__()}
_INTERNAL = re.compile(r"(literal|tuple)\[|(function|constrained)-|\[key\]$")
HAVE_OPTIONS = ("placement", "cluster.devices")
"""Settings with options of their own, which become overrides."""
_LISTS: dict[int | str, str] = {
    "nodes": "[{devices: 8}]",
    "targets": "[q_proj, v_proj]",
    "loggers": "[{name: tensorboard}]",
    "sources": "[{path: a.jsonl}]",
    "stop": "[END]",
}
# by the first word of pydantic's error types
_EXPECTED = {
    "bool": "true or false",
    "dict": "a mapping",
    "finite": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "model": "a mapping",
    "string": "a text",
}


def load_spec(path: str | Path, overrides: Sequence[str] = (), placement: Sequence[Any] | str | None = None) -> Spec:
    """Read a YAML file, apply ``key.sub=value`` overrides and validate. Raises UserError with one sentence.

    placement:  a vector, or its text, in the place of the file's.
    """
    return SpecFile(path).spec(overrides, placement)


class SpecFile:
    """A YAML file, read once for all specs that are made of it. Raises UserError if it is no mapping."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._raw = _read_mapping(Path(in_home(self.path)))

    @property
    def name(self) -> str:
        """Name of its run."""
        return str(self._raw.get("name"))

    def spec(self, overrides: Sequence[str] = (), placement: Sequence[Any] | str | None = None) -> Spec:
        """Return the validated spec with ``overrides`` and ``placement``, as of ``load_spec``."""
        raw = deepcopy(self._raw)
        scoped = [(override, *split_scope(override)) for override in overrides]
        applied = [(override, setting) for override, scope, setting in scoped if scope in (None, raw.get("name"))]
        for _, setting in applied:
            apply_override(raw, setting)
        if placement is not None:
            is_vector = isinstance(placement, Sequence) and not isinstance(placement, str)
            raw["placement"] = list(placement) if is_vector else placement
        return parse_spec(raw, self.path, applied)


def _read_mapping(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UserError(f"config {path}: a directory; give a YAML file")
    if not path.is_file():
        raise UserError(f"config {path}: {_no_file(path)}")
    try:
        raw = read_settings(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"config {path}: not YAML: {explain(error)}") from None
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
    return f"no such file{instead_of(path, is_yaml)}"


def split_scope(override: str) -> tuple[str | None, str]:
    """Return the run's name, or None, and the setting: ``NAME:key=value`` is for the run of that name alone."""
    key, equals, value = override.partition("=")
    scope, colon, name = key.rpartition(":")
    return (scope if colon else None), name + equals + value


def check_scopes(overrides: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for an override of a run that the command does not have. ``names``: of its runs."""
    for override in overrides:
        scope, _ = split_scope(override)
        if scope is not None and scope not in names:
            known = f"there are {', '.join(names)}"
            raise UserError(
                f"--set {shown_override(override)}: no run is named {scope!r}{nearest(scope, names)}; {known}"
            )


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
    return [*map(str, overrides), *path_settings(paths or {}), *further]


def path_settings(paths: Mapping[str, str | Path | None]) -> Iterator[str]:
    """Yield the overrides that give models these directories or names, by role (Fig. 5); JSON is YAML."""
    for role, path in paths.items():
        if path is not None:
            yield f"models.{role}.init=null"
            yield f"models.{role}.path={json.dumps(str(path))}"


def parse_spec(raw: dict[str, Any], origin: str = "config", applied: Sequence[tuple[str, str]] = ()) -> Spec:
    """Validate a mapping. Raises UserError with one sentence for the deepest problem.

    origin:   the file, for it.
    applied:  overrides as they were written, each with its setting, for a problem of that setting.
    """
    try:
        return Spec.model_validate(raw)
    except ValidationError as error:
        problem = _first_problem(error)
        raise UserError(f"{_written_in(problem, applied) or origin}: {problem}") from None


def _written_in(problem: str, applied: Sequence[tuple[str, str]]) -> str | None:
    """Return the override of the setting that ``problem`` names; None for one of the file."""
    where, _, message = problem.partition(": ")
    if (unknown := re.search(r"unknown key '([^']*)'", problem)) is not None:
        where = unknown[1] if where.startswith("unknown key") else f"{where}.{unknown[1]}"
    for override, setting in reversed(applied):
        key = setting.partition("=")[0]
        parent, _, last = key.rpartition(".")
        is_below = f"{where}.".startswith(f"{key}.") or (unknown is not None and key.startswith(f"{where}."))
        is_named = parent == where and re.search(rf"\b{re.escape(last)}\b", message) is not None
        if key not in HAVE_OPTIONS and (is_below or is_named):
            return f"--set {shown_override(override)}"
    return None


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
        raise UserError(f"{written}: the value is not YAML: {explain(error)}") from None


def dump_spec(spec: Spec, short: bool = False) -> str:
    """Return the resolved YAML: loading and planning it gives the same spec. ``short``: without settings that are the
    default."""
    return write_yaml(spec_data(spec, short))


def spec_data(spec: Spec, short: bool = False) -> dict[str, Any]:
    """Return the mapping of ``dump_spec``, which is also that of a JSON."""
    spec = spec.as_written
    if short:
        spec = spec.model_copy(update={"rollout": spec.rollout.as_written})
    raw = spec.model_dump(mode="json", by_alias=True, exclude_defaults=short)
    raw["models"] = {role: model for role, model in raw["models"].items() if model is not None}
    for role, model in spec.models:
        # not the default of every device, and not the one of every reference
        for name in ("dtype", *(PASS_SETTINGS if role == "ref" else ())):
            if model is not None and name in model.model_fields_set:
                raw["models"].setdefault(role, {})[name] = getattr(model, name)
    if spec.models.all is not None:
        raw["models"] = _written_models(spec.models)
    if isinstance(spec.algorithm, PolicySpec) and spec.algorithm.kl is not None and "kl" in raw["algorithm"]:
        # a part of a penalty is read over the algorithm's own, whose settings are not those of every penalty
        raw["algorithm"]["kl"] = spec.algorithm.kl.model_dump(mode="json")
    if spec.algorithm.like is not None:
        # a default that differs from the preset must be written
        raw["algorithm"] = spec.algorithm.model_dump(mode="json", by_alias=True)
        for role in trained_roles(spec.algorithm.like, spec.algorithm.name):
            model = spec.models.of(role)
            if model is not None:
                raw["models"][role] = {
                    **raw["models"].get(role, {}),
                    "optimizer": model.optimizer.model_dump(mode="json"),
                }
    raw["algorithm"] = {"name": spec.algorithm.name, **raw["algorithm"]}
    if isinstance(spec.placement, PlacementMap):
        further = {key: each for key, each in raw["placement"].items() if key != "models"}
        if spec.placement.operators is None:
            further.pop("operators", None)
        raw["placement"] = {**raw["placement"]["models"], **further}
    return raw


def _written_models(models: ModelsSpec) -> dict[str, Any]:
    """Return ``all`` and the roles as they are written: a default of a role may differ from ``all``."""
    written = {role: model for role, model in (("all", models.all), *models) if model is not None}
    raw = {role: model.model_dump(mode="json", exclude_unset=True) for role, model in written.items()}
    shared = raw["all"].items()
    return {
        role: model if role == "all" else dict(each for each in model.items() if each not in shared)
        for role, model in raw.items()
    }


def _named(where: str) -> tuple[str, Sequence[str]]:
    """Return the kind of a mapping with a ``name``, and the names that there are."""
    group = "loggers" if where.startswith("loggers") else "algorithms"
    return group.removesuffix("s"), tuple(plugins(group))


def _first_problem(error: ValidationError) -> str:
    """Return one sentence for the deepest problem: the dotted key, the mistake, the value."""
    problems = error.errors(include_url=False)
    problem = max(
        problems, key=lambda item: ("unknown key" in item["msg"], len(item["loc"]), item["type"] == "value_error")
    )
    where, kind = _dotted(problem["loc"]), problem["type"]
    if kind == "union_tag_invalid":
        name, (section, names) = problem["input"]["name"], _named(where)
        return f"{where}.name: unknown {section} {shown(name)}{nearest(str(name), names)}; known: {', '.join(names)}"
    if kind == "union_tag_not_found":
        return f"{where}.name: missing; known: {', '.join(_named(where)[1])}"
    message = plain_problem(problem)
    if (unknown := re.match(r"unknown key '([^']*)'", message)) is not None and (place := _place_of(unknown[1], where)):
        message = f"unknown key {unknown[1]!r} (did you mean {place}?)"
    return f"{where}: {message}" if where else message


def _place_of(key: str, where: str) -> str:
    """Return the setting that a ``key`` of another section names, in quotes, if it is one at the top or in one section
    alone; else nothing. A setting of models is one of the actor."""
    if key in Spec.model_fields:
        return f"{key!r} at the top"
    if where.startswith("models"):
        return ""
    sections: dict[str, type[BaseModel]] = {"models.actor": ModelSpec, "models.actor.optimizer": OptimizerSpec}
    sections |= {
        name: kind
        for name, field in Spec.model_fields.items()
        for kind in mappings(field.annotation)
        if name not in ("algorithm", "models", "placement", "reward", "cost", "loggers")
    }
    found = [name for name, kind in sections.items() if key in kind.model_fields]
    return f"{f'{found[0]}.{key}'!r}" if len(found) == 1 else ""


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return the key as a user wrote it: without the names that pydantic adds for a member of a union."""
    parts = list(loc)
    if parts[:1] == ["algorithm"]:
        parts[1:2] = [part for part in parts[1:2] if part not in ALGORITHMS]
    if parts[:3] == ["placement", "PlacementMap", "models"]:
        del parts[2]
    if parts[:1] in (["reward"], ["cost"]):
        parts[2:3] = [part for part in parts[2:3] if part not in KINDS]
    return ".".join(str(part) for part in parts if part not in _CLASS_NAMES and not _INTERNAL.match(str(part)))


def plain_problem(problem: ErrorDetails) -> str:
    """Return the expected value and the one found, in the words of a YAML file."""
    shows_value = problem["type"] not in {"value_error", "missing"} and "headers" not in problem["loc"]
    return _plain(problem) + (f", found {shown(_found(problem))}" if shows_value else "")


def _found(problem: ErrorDetails) -> Any:
    """Return the value of a problem without secrets."""
    return without_secrets(hidden(problem["input"], str(problem["loc"][-1]) if problem["loc"] else ""))


def _plain(problem: ErrorDetails) -> str:
    """Return the expected value, in the words of a YAML file."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "missing":
        return "missing"
    if kind == "literal_error" and problem["loc"][-1] == "literal['auto']":
        return "expected auto, true or false"
    if kind == "literal_error":
        return _choices(context, problem["input"])
    if kind == "model_attributes_type":
        name = problem["input"] if problem["input"] in ALGORITHMS else ALGORITHMS[0]
        return f"expected a mapping such as {{name: {name}}}"
    if kind == "source_kind":
        return _source_kinds(problem["input"])
    if kind == "too_short" and problem["loc"] in (("reward",), ("cost",)):
        return f"expected at least one source: {either(KINDS)}"
    if kind == "string_too_long":
        return f"expected at most {context['max_length']} characters"
    if kind == "string_pattern_mismatch":
        return f"expected a text that matches {context['pattern']}"
    if kind in {"tuple_type", "list_type"}:
        return f"expected a list such as {_LISTS.get(problem['loc'][-1], '[0, 1]')}"
    if kind == "model_type" and isinstance(problem["input"], bool):
        return "expected a mapping ({} for the defaults, null for none)"
    if expected := _EXPECTED.get(kind.partition("_")[0]):
        return f"expected {expected}"
    return problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _source_kinds(value: object) -> str:
    keys = [str(key) for key in value] if isinstance(value, dict) else []
    several = [kind for kind in KINDS if kind in keys]
    hint = "" if several else next(filter(None, (nearest(key, KINDS) for key in keys)), "")
    return f"expected a mapping with {'one of ' if several else ''}{either(KINDS)}{hint}"


def _choices(context: Mapping[str, Any], value: object) -> str:
    choices: str = context["expected"]
    several = "one of " if "," in choices else ""
    # three letters are close to too much: gpu would get cpu
    hint = nearest(str(value), re.findall("'([^']+)'", choices)) if len(str(value)) > 3 else ""
    return f"expected {several}{choices}{hint}"
