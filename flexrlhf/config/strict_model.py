"""Base of every section of the YAML, and descriptions of its settings from fields and docstrings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError

from flexrlhf.config.plugins import SHIPPED, Plugin, load_plugin
from flexrlhf.config.rules import Rule, RuleTable, RuleView, with_values
from flexrlhf.errors import nearest

RULE = "rule"
"""Type of the error of a rule, as pydantic names types of errors."""
LEAST_SECONDS = 0.01
"""Shortest limit of a call: a process or a service cannot reply in less."""


class StrictModel(BaseModel):
    """One mapping of the YAML, as a frozen pydantic model that refuses unknown keys and names the nearest valid one."""

    # NaN in a free mapping, such as init, is written as what it is, not as null
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Which settings of the section go together."""

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        if self.RULES:
            for error in _section_rules(type(self)).refusals(SectionView(self)):
                found = InitErrorDetails(
                    type=PydanticCustomError(RULE, "{reason}", {"reason": error.reason}),
                    loc=(error.setting,),
                    input=getattr(self, error.setting),
                )
                raise ValidationError.from_exception_data(type(self).__name__, [found])
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if not cls._is_known(str(key)):
                    hint = nearest(str(key), cls._keys()) or f"; known: {', '.join(sorted(cls._keys()))}"
                    raise ValueError(f"unknown key {key!r}{hint}")
            for key, kind in cls._plain().items():
                found = value.get(key)
                if isinstance(found, str) or (found is not None and isinstance(found, bool) != (kind is bool)):
                    error = InitErrorDetails(type=f"{kind.__name__}_type", loc=(key,), input=found)
                    raise ValidationError.from_exception_data(cls.__name__, [error])
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON Schema of this mapping, in which every setting has a description."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["description"] = plain_text(cls.__doc__)
        for name, field in cls.model_fields.items():
            described = schema.get("properties", {}).get(field.alias or name, {})
            if text := meaning(cls, name):
                described.setdefault("description", text)
        return schema

    @classmethod
    @cache
    def _keys(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    @cache
    def _plain(cls) -> Mapping[str, type]:
        """Return the keys of numbers and of truth values with their types; pydantic reads them from texts, too."""
        fields = {
            field.alias or name: {*get_args(field.annotation)} or {field.annotation}
            for name, field in cls.model_fields.items()
        }
        return {
            key: kind
            for key, parts in fields.items()
            for kind in (bool, int, float)
            if kind in parts <= {kind, NoneType}
        }

    @classmethod
    def _is_known(cls, key: str) -> bool:
        return key in cls._keys()


@dataclass(frozen=True)
class SectionView(RuleView):
    """Subjects of the rules of one section of the YAML: its settings."""

    settings: StrictModel

    def place(self, setting: str) -> tuple[str, str]:
        return "", setting

    def changed(self, changes: Mapping[str, object]) -> Self:
        return replace(self, settings=with_values(self.settings, changes))


@cache
def _section_rules(section: type[StrictModel]) -> RuleTable:
    """Return the table of the rules of a section."""

    class OfSection(SectionView):
        @classmethod
        def default(cls, setting: str) -> object:
            return section.model_fields[setting].default

    return RuleTable(OfSection, section.RULES)


def optional_fields(kind: type[BaseModel], *names: str) -> type[BaseModel]:
    """Return a base class with these fields of ``kind``, which may be null and are by default."""
    optional: dict[str, Any] = {}
    for name in names:
        field, own = kind.model_fields[name], Field(description=kind.model_fields[name].description)
        annotation: Any = field.annotation
        optional[name] = (Annotated[annotation | None, own, *field.metadata], None)
    return create_model(f"Optional{kind.__name__}", **optional)


def meaning(kind: type[BaseModel], name: str) -> str:
    """Return the description of a field, else of the field that it replaces, else the subject of its mapping."""
    fields = [getattr(base, "model_fields", {}).get(name) for base in kind.__mro__]
    described = [field.description for field in fields if field is not None and field.description]
    return described[0] if described else _subject([*mappings(kind.model_fields[name].annotation)])


def _subject(kinds: Sequence[type[BaseModel]]) -> str:
    """Return the first sentence about a mapping, as the meaning of a key."""
    if len(kinds) != 1:
        return "see below" if kinds else ""
    sentence = re.split(r"\.(?=\s+[A-Z`]|$)", plain_text(kinds[0].__doc__))[0]
    return sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() else sentence


def plain_text(docstring: str | None) -> str:
    """Return a docstring in one line, with code in single backticks."""
    return " ".join((docstring or "").replace("``", "`").split())


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield a type and all types that it is made of."""
    yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def mappings(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of the mappings that a field of this type may have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from mappings(argument)


def plugin_settings(group: str) -> Any:
    """Return the validator of a mapping whose ``name`` may be that of another package's plug-in, which has a class of
    settings: itself, or its attribute ``settings``."""

    def validate(written: Any, others: Callable[[Any], Any]) -> Any:
        name = written.get("name") if isinstance(written, dict) else None
        if not isinstance(name, str) or name in SHIPPED[group] or Plugin.find(group, name) is None:
            return others(written)
        loaded = load_plugin(group, name)
        return getattr(loaded, "settings", loaded).model_validate(written)

    return WrapValidator(validate)
