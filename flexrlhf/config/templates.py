"""A user's prompt template: a text with ``{column}`` in it, and no other expression."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any


def check_template(template: str) -> str:
    """Return ``template``. Raises ValueError where it has another field than a plain ``{column}``, or none."""
    if not template_fields(template):
        raise ValueError(f"no field such as {{question}} in {template!r}")
    return template


def template_fields(template: str) -> tuple[str, ...]:
    """Return the columns that a template names, in order. Raises ValueError."""
    return tuple(field for _, field in _parts(template) if field is not None)


def render(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each field replaced by its value."""
    return "".join(text + ("" if field is None else values[field]) for text, field in _parts(template))


def _parts(template: str) -> list[tuple[str, str | None]]:
    """Return texts, each with the column that follows it. Raises ValueError for anything but plain columns."""
    try:
        parts: list[tuple[str, str | None, Any, Any]] = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error} in {template!r}; write {{{{ and }}}} for braces") from None
    for _, field, form, conversion in parts:
        if field is not None and (form or conversion or not field.replace("-", "_").isidentifier()):
            found = field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(
                f"the field {{{found}}} is no plain column such as {{question}}; write {{{{ and }}}} for braces, and "
                f"name what is inside a column with columns"
            )
    return [(text, field) for text, field, _, _ in parts]
