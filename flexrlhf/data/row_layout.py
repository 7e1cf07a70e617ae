"""Values of a row by the names of its columns, those inside nested columns and a user's own names included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexrlhf.config.data_settings import filled_template, template_fields
from flexrlhf.data.files import Row, json_type
from flexrlhf.errors import UserError, nearest

_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class RowLayout:
    """Settings by which rows are read, in addition to their form.

    columns:      name that a form or a score uses → column of the row
    template:     text of the prompt with ``{column}`` fields; None: that of the form
    system:       system prompt of rows without one of their own
    is_episode:   whether an environment adds messages to a prompt, which may be empty then
    makes_chats:  whether texts are chats, as other rows of the file have a system prompt in a column
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    system: str | None = None
    is_episode: bool = False
    makes_chats: bool = False

    def named(self, row: Row) -> Row:
        """Return ``row`` as a form reads it: the user's columns under the names that stand for them."""
        if not self.columns:
            return row
        sources = set(self.columns.values())
        others = {name: value for name, value in row.items() if name not in sources}
        return others | self._renamed(dict(_flat(row)))

    def all_columns(self, row: Row) -> Row:
        """Return every column of ``row``: under its own name, nested ones by dotted names, and by a user's names."""
        if not self.columns and not any(isinstance(value, dict) for value in row.values()):
            return row
        values = dict(_flat(row))
        return values | self._renamed(values)

    def prompt(self, row: Row) -> str | None:
        """Return the prompt that the template makes of ``row``; None without one."""
        if self.template is None:
            return None
        values = self.all_columns(row)
        texts = {name: _text(values, name) for name in template_fields(self.template)}
        # nothing to put into the template is no prompt
        return filled_template(self.template, texts) if any(map(str.strip, texts.values())) else ""

    def _renamed(self, values: Row) -> Row:
        """Return the values that the user gives names, by these."""
        return {name: values[column] for name, column in self.columns.items() if column in values}


def text_column(row: Row, name: str) -> str:
    """Return the text in a column. Raises UserError, without the row's number, where there is none."""
    if name not in row:
        raise UserError(missing(row, name))
    return checked_text(row[name], repr(name))


def checked_text(value: object, name: str) -> str:
    """Return ``value``, which must be a text. Raises UserError with ``name``."""
    if not isinstance(value, str):
        raise UserError(f"{name} must be a string, found {json_type(value)}")
    if _HALF_OF_A_PAIR.search(value):
        raise UserError(f"{name} contains half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return value


def missing(row: Mapping[str, Any], *names: str) -> str:
    """Return the sentence for a row without a column, or several."""
    return f"needs the column{'s' * (len(names) > 1)} {' and '.join(map(repr, names))}, but has the keys {keys(row)}"


def keys(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns for a message."""
    return ", ".join(repr(key) for key in row) or "(none)"


def absent_columns(columns: Mapping[str, str], rows: list[Row]) -> dict[str, str]:
    """Return the names in ``columns``, name → column, whose column no row has, each with the message's rest."""
    found = dict.fromkeys(name for row in rows for name, _ in _flat(row)) if columns else {}
    rest = f"there are {', '.join(found)}"
    return {
        name: f"no column of the rows{nearest(column, found)}; {rest}"
        for name, column in columns.items()
        if column not in found
    }


def _text(values: Row, name: str) -> str:
    """Return a template's value: a text, or a number as JSON writes it."""
    value = values.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return text_column(values, name)


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the columns of a row, and those inside nested ones as ``outer.inner``."""
    for name, value in row.items():
        yield prefix + name, value
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
