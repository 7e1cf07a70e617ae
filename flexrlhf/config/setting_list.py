"""All settings of the YAML as the schema has them: a list for the reference and the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flexrlhf.config import reward_sources
from flexrlhf.config.algorithms import ALGORITHMS, AnyAlgorithm
from flexrlhf.config.algorithms.base import AlgorithmSpec, SampledSpec
from flexrlhf.config.algorithms.grpo import GroupSpec
from flexrlhf.config.algorithms.policy import PolicySpec
from flexrlhf.config.algorithms.reinforce import ReturnsSpec
from flexrlhf.config.algorithms.supervised import PreferenceSpec
from flexrlhf.config.model_settings import ModelsSpec
from flexrlhf.config.output_settings import LOGGERS, LoggerSpec
from flexrlhf.config.placement_settings import OperatorPlacement, PlacementEntry, PlacementMap
from flexrlhf.config.spec import Spec
from flexrlhf.config.strict_model import mappings, meaning, plain_text
from flexrlhf.errors import UserError, nearest

NARROWEST, WIDEST = 40, 120
"""Columns of a text."""
_ROLES = ("all", "actor", "critic", "cost_critic", "ref", "reward", "cost")


@dataclass(frozen=True)
class SettingRow:
    """One setting.

    name:     last part of its key.
    values:   type, choices and bounds.
    default:  as the YAML has it; empty if the setting is required.
    meaning:  its effect, with its unit.
    """

    name: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True)
class SettingSection:
    """Settings of one mapping.

    title:       of the section, with code in backticks.
    prefix:      of its keys, with the names that a user chooses in capitals; empty at the top of the YAML.
    text:        description of the mapping.
    rows:        its settings.
    algorithms:  names of those that have these settings; empty: all.
    """

    title: str
    prefix: str
    text: str
    rows: tuple[SettingRow, ...]
    algorithms: tuple[str, ...] = ()

    def key(self, row: SettingRow) -> str:
        """Return the whole dotted key of ``row``."""
        return f"{self.prefix}.{row.name}" if self.prefix else row.name


def setting_sections() -> Iterator[SettingSection]:
    """Yield all sections, in the order of the YAML."""
    yield _section("The YAML", "", Spec)
    yield from _algorithm()
    yield from _sources()
    for name, kind in zip(LOGGERS, mappings(LoggerSpec), strict=True):
        yield _section(f"`loggers`: `{name}`", "loggers", kind)
    seen: set[type[BaseModel]] = set()
    for name, field in Spec.model_fields.items():
        if name not in ("algorithm", "reward", "cost", "loggers"):
            yield from _below(name, field, seen)


def _below(
    path: str, field: FieldInfo, seen: set[type[BaseModel]], names: tuple[str, ...] = ()
) -> Iterator[SettingSection]:
    """Yield sections of the mappings that a field may have, and of those in them, each once."""
    for kind in mappings(field.annotation):
        if kind in seen:
            continue
        seen.add(kind)
        if kind is PlacementMap:
            yield _section("`placement`, as a mapping", path, kind, (*PlacementMap.SETTINGS, "operators"))
            yield _section("`placement.MODEL`", f"{path}.MODEL", PlacementEntry)
            yield _section("`placement.operators.OPERATOR`", f"{path}.operators.OPERATOR", OperatorPlacement)
            continue
        yield _section(f"`{path}`", path, kind, () if kind is ModelsSpec else None, names)
        for name, inner in kind.model_fields.items():
            role = "ROLE" if kind is ModelsSpec else name
            yield from _below(f"{path}.{role}", inner, seen, names)


def _section(
    title: str,
    prefix: str,
    kind: type[BaseModel],
    names: Sequence[str] | None = None,
    named: tuple[str, ...] = (),
    note: str = "",
) -> SettingSection:
    text = " ".join(part for part in (plain_text(kind.__doc__), note) if part)
    fields = {name: field for name, field in kind.model_fields.items() if names is None or name in names}
    rows = tuple(
        SettingRow(field.alias or name, _values(field), _default(field), meaning(kind, name))
        for name, field in fields.items()
    )
    return SettingSection(title, prefix, text, rows, named)


_FAMILIES: Mapping[type[BaseModel], str] = {
    AlgorithmSpec: "all algorithms",
    SampledSpec: "sampling",
    PolicySpec: "the policy gradient",
    GroupSpec: "groups of samples",
    ReturnsSpec: "returns without a critic",
    PreferenceSpec: "preference pairs",
}


def _algorithm() -> Iterator[SettingSection]:
    """Yield the settings that algorithms have in common, then the settings of each."""
    named = get_args(AnyAlgorithm)
    seen: set[type[BaseModel]] = set()
    for kind in (*_common(named), *named):
        own = [name for name in kind.model_fields if name in kind.__annotations__ and name != "name"]
        names = tuple(_name_of(each) for each in named if issubclass(each, kind))
        if kind in named:
            parents = [parent for parent in kind.__mro__[1:] if parent in named]
            note = f"In addition to those of `{_name_of(parents[0])}`." if parents else ""
            yield _section(f"`algorithm`: `{_name_of(kind)}`", "algorithm", kind, own, names, note)
        else:
            listed = ", ".join(f"`{name}`" for name in names)
            note = "" if len(names) == len(named) else f"Settings of {listed}."
            yield _section(f"`algorithm`: {_FAMILIES[kind]}", "algorithm", kind, own, names, note)
        for name in own:
            yield from _below(f"algorithm.{name}", kind.model_fields[name], seen, names)


def _common(named: Sequence[type[BaseModel]]) -> list[type[BaseModel]]:
    """Return the classes that algorithms extend and that are none themselves, general ones first."""
    bases = {base for kind in named for base in kind.__mro__ if issubclass(base, AlgorithmSpec)}
    extended = {each for each in bases if not each.model_fields.keys().isdisjoint(each.__annotations__)}
    assert extended - {*named} == {*_FAMILIES}, "_FAMILIES has a title for each of them"
    return list(_FAMILIES)


def _name_of(kind: type[BaseModel]) -> str:
    return str(kind.model_fields["name"].default)


def _sources() -> Iterator[SettingSection]:
    for key in reward_sources.KINDS:
        source = getattr(reward_sources, {"url": "Service"}.get(key, key.capitalize()) + "Source")
        yield _section(f"`reward`, `cost`: a source with `{key}`", "reward", source)


def _values(field: FieldInfo) -> str:
    bounds = [_bound(bound) for bound in field.metadata]
    return " ".join([_words(_written(field.annotation, field.metadata)), *(bound for bound in bounds if bound)])


def _written(annotation: Any, metadata: Sequence[Any]) -> Any:
    """Return the type of a YAML's value, where a validator takes more than the field's own; a fraction is a
    number."""
    taken = [getattr(each, "json_schema_input_type", PydanticUndefined) for each in metadata]
    return next((each for each in taken if each is not PydanticUndefined and annotation is not Fraction), annotation)


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{yaml_text(value)}`" for value in arguments)
    if origin is tuple:
        return f"list of {_words(arguments[0])}s" if arguments[1:] == (...,) else f"list of {len(arguments)} numbers"
    if origin is dict:
        return "mapping"
    if origin is not None and hasattr(annotation, "__metadata__"):
        return _words(_written(arguments[0], annotation.__metadata__))
    if arguments:
        return " or ".join(dict.fromkeys(_words(argument) for argument in arguments if argument is not NoneType))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {bool: "`true` or `false`", int: "integer", float: "number", str: "text"}.get(annotation, "number")


def _bound(metadata: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = {sign: getattr(metadata, name) for name, sign in signs.items() if hasattr(metadata, name)}
    return " ".join(f"{sign} 2^63" if bound == 2**63 else f"{sign} {bound:g}" for sign, bound in bounds.items())


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return ""
    if field.default_factory is not None or value == ():
        return "{}" if field.default_factory is dict else "[]"
    if isinstance(value, BaseModel):
        return yaml_text({name: getattr(value, name) for name in sorted(value.model_fields_set)})
    return "" if value is PydanticUndefined else yaml_text(value)


def yaml_text(value: Any) -> str:
    """Return a value in one line, as a YAML has it."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case dict():
            return "{" + ", ".join(f"{key}: {yaml_text(inner)}" for key, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(yaml_text, value)) + "]"
        case float():
            return f"{value:g}" if value != int(value) else f"{value:.1f}"
    return str(value)


def find_settings(text: str | None) -> list[SettingSection]:
    """Return the sections with settings that ``text`` finds, with these alone. Raises UserError if it finds none.

    text:  a key or the start of one, an algorithm, or a part of a key; None: all settings.
    """
    sections = list(setting_sections())
    if text is None:
        return sections
    if text in ALGORITHMS:
        return [section for section in sections if text in section.algorithms]
    below, lower = text.strip("."), text.lower()
    found = _with_rows(sections, lambda key: _is_below(key, below)) or _with_rows(
        sections, lambda key: lower in key.lower()
    )
    if not found:
        parts = dict.fromkeys(part for each in sections for row in each.rows for part in each.key(row).split("."))
        hint = nearest(text.rpartition(".")[2], [*parts, *ALGORITHMS])
        raise UserError(f"settings {text}: no such setting{hint}; flexrlhf settings lists all of them")
    return found


def _with_rows(sections: Sequence[SettingSection], is_found: Callable[[str], bool]) -> list[SettingSection]:
    """Return the sections with settings whose dotted keys are found, with these alone."""
    found = [replace(each, rows=tuple(row for row in each.rows if is_found(each.key(row)))) for each in sections]
    return [section for section in found if section.rows]


def _is_below(key: str, text: str) -> bool:
    """Whether ``text`` is ``key`` or the start of it, part by part."""
    parts, given = key.split("."), text.split(".")
    return len(given) <= len(parts) and all(map(_is_same, parts, given))


def _is_same(part: str, given: str) -> bool:
    """Whether a part of a key is the given one; a role or another name of the user's own is in capitals."""
    return part in (given, "ROLE", "MODEL", "OPERATOR")


def format_settings(text: str | None, width: int) -> str:
    """Return the settings that ``text`` finds, of at most ``width`` columns, with each key on a line of its own.

    ``text``: as in ``find_settings``. Raises UserError if it finds none.
    """
    columns = max(NARROWEST, min(width, WIDEST))
    return "\n".join(line for section in find_settings(text) for line in _lines(section, columns)).rstrip()


def _lines(section: SettingSection, width: int) -> Iterator[str]:
    yield f"# {section.title.replace('`', '')}"
    if section.algorithms:
        listed = f"{', '.join(section.algorithms)}"
        yield from _wrapped("all algorithms" if len(section.algorithms) == len(ALGORITHMS) else listed, width, "#   ")
    for row in section.rows:
        default = f"default {row.default}" if row.default else "required"
        yield section.key(row)
        yield from _wrapped(f"{row.values.replace('`', '')}; {default}", width, "    ")
        if row.meaning:
            yield from _wrapped(row.meaning.replace("`", ""), width, "    ")
    yield ""


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def keys_from(start: str) -> Iterator[str]:
    """Yield the dotted keys that begin with ``start``, up to their next part.

    Names that a user chooses are the usual roles.
    """
    scope, colon, key = start.rpartition(":")
    typed = key.split(".")
    found: dict[str, None] = {}
    for section in setting_sections():
        for row in section.rows:
            parts = section.key(row).split(".")
            if len(parts) >= len(typed) and all(map(_is_same, parts, typed[:-1])):
                ends = len(parts) == len(typed)
                for name in _ROLES if parts[len(typed) - 1] == "ROLE" else (parts[len(typed) - 1],):
                    if name.startswith(typed[-1]) and not re.fullmatch("[A-Z]+", name):
                        found[".".join([*typed[:-1], name]) + ("=" if ends else ".")] = None
    for each in found:
        if not (each.endswith("=") and f"{each[:-1]}." in found):
            yield f"{scope}{colon}{each}"
