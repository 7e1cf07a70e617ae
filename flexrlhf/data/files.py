"""Data files as lists of rows: ``.jsonl``, ``.jsonl.gz``, or ``.json`` with a list of objects.

Whatever a user can mend raises ``UserError`` with the file and the line or row.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from flexrlhf.errors import UserError, nearest

Row = dict[str, Any]


def read_rows(path: Path | str) -> list[Row]:
    """Return the objects of a ``.jsonl``, ``.jsonl.gz`` or ``.json`` file; at least one, else ``UserError``."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no data file {path}{_nearest_file(path)}")
    rows = _parse(path, _read_text(path))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number}: a row must be a JSON object, found {json_type(row)}")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def json_limit(error: ValueError | RecursionError) -> str:
    """Return why a text that may be valid JSON or YAML is not read: nested too deeply, or a number too long."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def json_type(value: object) -> str:
    """Name of a JSON value's type with its article, such as ``a list``."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist"
    return nearest(path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.is_file()))


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _parse(path: Path, text: str) -> list[Any]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        # Not splitlines(): JSON strings may contain U+2028 and other characters that it takes for line ends.
        lines = text.rstrip().split("\n") if text.strip() else []
        return [_parse_json(path, line, number) for number, line in enumerate(lines, start=1)]
    if path.suffix != ".json":
        raise UserError(f"cannot read {path}: its name must end in .jsonl, .jsonl.gz or .json")
    rows = _parse_json(path, text, 1)
    if not isinstance(rows, list):
        raise UserError(f"{path} must contain a list of objects, found {json_type(rows)}")
    return rows


def _parse_json(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path}, line {line}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {first_line}: cannot be read as JSON ({json_limit(error)})") from None
