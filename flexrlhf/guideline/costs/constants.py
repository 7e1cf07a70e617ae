"""Constants of the cost model, read from tables: CSV files next to the code.

Each row ends with its ``source``: the publication or measurement that its numbers are fitted on, or that they are
assumed. Spaces after a comma align the columns; an empty cell stands for the field's default.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter

Row = TypeVar("Row")


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by column, without empty cells."""
    with path.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream, skipinitialspace=True)
        return [{column: cell for column, cell in row.items() if cell} for row in rows]


def named_rows(row_type: type[Row], rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Return ``rows`` as instances of a dataclass, by name. Raises KeyError for a column that is none of its fields,
    ValueError for a cell of another type."""
    cells = {name: TypeAdapter(hint) for name, hint in get_type_hints(row_type).items()}
    omitted = {"name", "source"} - cells.keys()
    return {
        row["name"]: row_type(**{column: cells[column].validate_python(row[column]) for column in row.keys() - omitted})
        for row in rows
    }
