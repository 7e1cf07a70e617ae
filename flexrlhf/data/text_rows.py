"""Rows of a data file as text, and why others cannot be read: all checks that need no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from flexrlhf.config.data_settings import BadRows
from flexrlhf.data.files import Row, numbered_rows
from flexrlhf.data.forms import (
    FORMS,
    PLAIN,
    check_layout,
    detect_form,
    gives_system,
    has_response,
    needed_text,
)
from flexrlhf.data.row_layout import RowLayout
from flexrlhf.data.text_example import TextExample
from flexrlhf.errors import UserError, nearest
from flexrlhf.operators.graph import Needs


@dataclass(frozen=True)
class TextRows:
    """Rows of a data file as text.

    form:      of all rows
    num_rows:  of the file; where it is large, only some of them are read
    texts:     rows by their numbers from 1
    bad:       why others cannot be read, by their numbers
    """

    form: str
    num_rows: int
    texts: dict[int, TextExample]
    bad: dict[int, str]

    @classmethod
    def read(
        cls,
        path: str,
        form: str,
        needs: Needs,
        layout: RowLayout,
        *,
        drops: bool = False,
        rows: Sequence[Row] | None = None,
        most: int | None = None,
    ) -> Self:
        """Read a file, all of its rows or ``most`` evenly spaced ones, or ``rows`` of a program.

        drops:  whether lines that are no JSON are rows that cannot be read; else they raise UserError, as does a file
                whose form is not known
        """
        found, bad = numbered_rows(path, drops) if rows is None else (dict(enumerate(rows, start=1)), {})
        if not found:
            first, reason = min(bad.items())
            raise UserError(f"{path}, row {first}: {reason}")
        form = _found_form(path, found, form, needs, layout, drops)
        layout = replace(layout, makes_chats=any(gives_system(row, layout) for row in found.values()))
        numbers, texts = sorted({*found, *bad}), dict[int, TextExample]()
        read = [numbers[index] for index in spaced(len(numbers), len(numbers) if most is None else most)]
        bad = {number: bad[number] for number in read if number in bad}
        for number in read:
            if number in found:
                try:
                    text = needed_text(found[number], form, needs, layout)
                except UserError as error:
                    bad[number] = str(error)
                else:
                    texts[number] = replace(text, columns=layout.all_columns(found[number]))
        return cls(form, len(numbers), texts, bad)

    @classmethod
    def usable(
        cls,
        path: Path | str,
        *,
        form: str = "auto",
        needs: Needs,
        layout: RowLayout = PLAIN,
        bad_rows: BadRows = "error",
    ) -> list[TextExample]:
        """Return the rows of a file as text. Raises UserError for one that cannot be read, unless it is dropped."""
        rows = cls.read(str(path), form, needs, layout, drops=bad_rows == "drop")
        rows.check(str(path), bad_rows)
        return list(rows.texts.values())

    @staticmethod
    def has_responses(path: str, form: str, layout: RowLayout, bad_rows: BadRows) -> bool:
        """Whether the first row of a file that can be read has a response. Raises UserError as ``usable``."""
        found, _ = numbered_rows(path, bad_rows == "drop")
        form = _found_form(path, found, form, "responses", layout, bad_rows == "drop")
        for row in found.values():
            try:
                return has_response(row, form, layout)
            except UserError:
                if bad_rows != "drop":
                    raise
        return False

    def check(self, path: str, bad_rows: BadRows) -> None:
        """Raise UserError for a row that cannot be read, if none is left out; else if none is left."""
        if not self.bad or (bad_rows == "drop" and len(self.bad) < len({*self.texts, *self.bad})):
            return
        first, reason = min(self.bad.items())
        raise UserError(f"{path}, row {first}: {reason}{further_bad(self.bad, self.num_rows)}")


def further_bad(bad: Mapping[int, str], num_rows: int) -> str:
    """Return how many rows cannot be read, if there is more than one."""
    return f"; {len(bad)} of {num_rows} rows cannot be read" if len(bad) > 1 else ""


def spaced(number: int, count: int) -> list[int]:
    """Return ``count`` of ``number`` indices, evenly spaced from the first one; all where there are no more."""
    count = min(count, number)
    return [index * number // count for index in range(count)]


def _found_form(path: str, rows: Mapping[int, Row], form: str, needs: Needs, layout: RowLayout, drops: bool) -> str:
    """Return the form of rows, for ``auto`` that of the first one, of which it is known if others are dropped. Raises
    UserError if it is not known."""
    known = ["auto", *FORMS]
    if form not in known:
        raise UserError(f"data.form={form} is not one of {', '.join(known)}{nearest(form, known)}")
    check_layout(layout, list(rows.values()), needs, path)
    if form != "auto":
        return form
    sentence = f"{path}: no row can be read"
    for number, row in rows.items():
        try:
            return detect_form(row, needs, layout)
        except UserError as error:
            sentence = f"{path}, row {number}: {error}"
            if not drops:
                break
    raise UserError(sentence)
