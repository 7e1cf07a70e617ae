"""Descriptions of settings, from their fields and from the docstrings of their mappings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def meaning(kind: type[BaseModel], name: str) -> str:
    """Return the description of a field, else that of the field it replaces, else what its mapping is."""
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


def mappings(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the classes of the mappings that a field of this type may have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from mappings(argument)
