"""Sentences about problems of a spec's mapping: the key as a user wrote it, the expected value, the one found."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flexrlhf.config.algorithms import ALGORITHMS
from flexrlhf.config.model_settings import ModelSpec, OptimizerSpec
from flexrlhf.config.plugins import Plugin
from flexrlhf.config.reward_sources import KINDS
from flexrlhf.config.secrets import hidden, shown_override, without_secrets
from flexrlhf.config.strict_model import RULE, StrictModel, mappings
from flexrlhf.errors import either, nearest, shown

_INTERNAL = re.compile(r"(literal|tuple)\[|(function|constrained)-|\[key\]$")
_SENTENCES = ("value_error", RULE)
"""Types of errors whose message is a sentence with the value found."""
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


@cache
def _class_names() -> frozenset[str]:
    return frozenset({"PlacementMap", *(kind.__name__ for kind in StrictModel.__subclasses__())})


def written_in(problem: str, applied: Sequence[tuple[str, str]]) -> str | None:
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


def _named(where: str) -> tuple[str, Sequence[str]]:
    """Return the kind of a mapping with a ``name``, and the names that there are."""
    group = "loggers" if where.startswith("loggers") else "algorithms"
    return group.removesuffix("s"), tuple(Plugin.of_group(group))


def first_problem(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return one sentence for the deepest problem: the dotted key, the mistake, the value. ``kind``: of the spec."""
    problems = error.errors(include_url=False)
    problem = max(
        problems, key=lambda item: ("unknown key" in item["msg"], len(item["loc"]), item["type"] in _SENTENCES)
    )
    where, mistake = _dotted(problem["loc"]), problem["type"]
    if mistake == "union_tag_invalid":
        name, (section, names) = problem["input"]["name"], _named(where)
        return f"{where}.name: unknown {section} {shown(name)}{nearest(str(name), names)}; known: {', '.join(names)}"
    if mistake == "union_tag_not_found":
        return f"{where}.name: missing; known: {', '.join(_named(where)[1])}"
    message = plain_problem(problem)
    if (unknown := re.match(r"unknown key '([^']*)'", message)) is not None and (
        place := _place_of(unknown[1], where, kind)
    ):
        message = f"unknown key {unknown[1]!r} (did you mean {place}?)"
    return f"{where}: {message}" if where else message


def _place_of(key: str, where: str, kind: type[BaseModel]) -> str:
    """Return the setting that a ``key`` of another section names, in quotes, if it is one at the top or in one section
    alone; else nothing. A setting of models is one of the actor."""
    if key in kind.model_fields:
        return f"{key!r} at the top"
    if where.startswith("models"):
        return ""
    sections: dict[str, type[BaseModel]] = {"models.actor": ModelSpec, "models.actor.optimizer": OptimizerSpec}
    sections |= {
        name: section
        for name, field in kind.model_fields.items()
        for section in mappings(field.annotation)
        if name not in ("algorithm", "models", "placement", "reward", "cost", "loggers")
    }
    found = [name for name, section in sections.items() if key in section.model_fields]
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
    if parts[:1] == ["loggers"]:
        parts[2:3] = [part for part in parts[2:3] if part not in Plugin.of_group("loggers")]
    return ".".join(str(part) for part in parts if part not in _class_names() and not _INTERNAL.match(str(part)))


def plain_problem(problem: ErrorDetails) -> str:
    """Return the expected value and the one found, in the words of a YAML file."""
    shows_value = problem["type"] not in {*_SENTENCES, "missing"} and "headers" not in problem["loc"]
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
