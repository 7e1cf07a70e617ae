"""Data files as lists of rows: ``.jsonl``, ``.jsonl.gz``, ``.json`` with a list of objects, ``.csv``, ``.parquet``, a
directory of ``datasets`` (with ``:split``), a data set on the Hub (``org/name:config:split``), or a task of
reasoning-gym (``reasoning-gym:task``).

Whatever a user can mend raises ``UserError`` with the file and the line or row.

pyarrow and datasets are an extra of the package, and are loaded where such a file is read.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.config.user_paths import instead_of
from flexrlhf.data.hub import HubName
from flexrlhf.data.reasoning_tasks import is_installed, is_task, read_task
from flexrlhf.errors import UserError, either, nearest
from flexrlhf.text import bytes_text

Row = dict[str, Any]


ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
"""Endings of the files that are read."""
SAVED = ("state.json", "dataset_dict.json")
"""Files of which ``save_to_disk`` of datasets writes one."""
ROW_BYTES = 2**26
"""Most bytes of a row that are always read; a row of twice as many is refused."""
SPLIT = "train"
"""Split that is read where none is named."""


def read_rows(path: Path | str) -> list[Row]:
    """Return the rows of a file, a directory, a data set on the Hub or a task; at least one, else ``UserError``."""
    rows, bad = numbered_rows(path)
    for number, reason in bad.items():
        raise UserError(f"{path}, row {number}: {reason}")
    return list(rows.values())


def numbered_rows(path: Path | str, drops: bool = False) -> tuple[dict[int, Row], dict[int, str]]:
    """Return the rows by their numbers from 1, and why others are none; at least one of either, else ``UserError``.

    drops:  whether lines that are no JSON are among the others; else they raise UserError.
    """
    found = dict(enumerate(_read(str(path), drops), start=1))
    if not found:
        raise UserError(f"{path} has no rows")
    lines = {number: line.reason for number, line in found.items() if isinstance(line, _BadLine)}
    others = {number: row for number, row in found.items() if number not in lines and not isinstance(row, dict)}
    bad = lines | {number: f"a row must be a JSON object, found {json_type(row)}" for number, row in others.items()}
    return {number: row for number, row in found.items() if number not in bad}, dict(sorted(bad.items()))


def is_present(path: Path | str) -> bool:
    """Whether there is such a file or directory, such a data set in the Hub's cache, or the generator of its rows."""
    if is_task(str(path)):
        return is_installed()
    if Path(path).exists() or _split_directory(str(path)) is not None:
        return True
    name = None if str(path).endswith(ENDINGS) else HubName.parse(str(path))
    return name is not None and name.cached("dataset") is not None


def absence(path: str) -> str:
    """Return the rest of a sentence on a path that is not present."""
    if is_task(path):
        return "needs reasoning-gym (flexrlhf[reasoning]): no rows are checked"
    if not path.endswith(ENDINGS) and HubName.parse(path) is not None:
        return "is not in the cache of the Hub yet, so its rows are not checked"
    return "does not exist yet, so its rows are not checked"


@dataclass(frozen=True)
class _BadLine:
    """A line that is no JSON."""

    reason: str


def _read(text: str, drops: bool) -> list[Any]:
    path = Path(text)
    if is_task(text):
        return read_task(text)
    if directory := _split_directory(text):
        return read_directory(*directory)
    if not path.is_file():
        name = None if text.endswith(ENDINGS) else HubName.parse(text)
        if name is None:
            raise UserError(_no_file(path))
        return read_hub(name)
    if not text.endswith(ENDINGS):
        raise UserError(f"cannot read {path}: its name must end in {either(ENDINGS)}")
    if path.suffix == ".parquet":
        return read_parquet(path)
    return _parse_csv(path, _read_text(path)) if path.suffix == ".csv" else _parse(path, _read_text(path), drops)


def _split_directory(text: str) -> tuple[Path, str | None] | None:
    """Return the directory of ``datasets`` and the split that a path names; None for another path."""
    whole, (before, _, split) = Path(text), text.rpartition(":")
    if is_saved_dataset(whole):
        return whole, None
    return (Path(before), split) if before and is_saved_dataset(Path(before)) else None


def _no_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory, but none that save_to_disk of datasets has written; give a file in it"
    return f"there is no data file {path}{instead_of(path, *ENDINGS)}"


def json_type(value: object) -> str:
    """Name of a JSON value's type with its article, such as ``a list``."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else f"a value of type {type(value).__name__}"
    return names.get(type(value), number)


def _read_text(path: Path) -> str:
    try:
        return b"".join(_parts(path)).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: byte {error.start + 1} is no UTF-8; write the file in UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _parts(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in parts. Raises UserError for one of rows with a part that ends no row."""
    is_zipped, has_rows = path.name.endswith(".gz"), path.name.endswith((".jsonl", ".jsonl.gz"))
    with gzip.open(path) if is_zipped else path.open("rb") as file:
        while part := file.read(ROW_BYTES):
            if has_rows and len(part) == ROW_BYTES and b"\n" not in part:
                raise UserError(f"cannot read {path}: a row of it has more than {bytes_text(ROW_BYTES)}")
            yield part


def _parse(path: Path, text: str, drops: bool) -> list[Any]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        # Not splitlines(): JSON strings may contain U+2028 and other characters that it takes for line ends.
        lines = text.rstrip().split("\n") if text.strip() else []
        return [_parse_line(path, line, number, drops) for number, line in enumerate(lines, start=1)]
    rows = _parse_json(path, text, 1)
    if not isinstance(rows, list):
        raise UserError(f"{path} must contain a list of objects, found {json_type(rows)}")
    return rows


def _parse_line(path: Path, text: str, number: int, drops: bool) -> Any:
    try:
        return _parse_json(path, text, number)
    except UserError as error:
        if not drops:
            raise
        return _BadLine(str(error).removeprefix(f"{path}, line {number}: "))


def _parse_json(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{path}, line {line}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise UserError(f"{path}, line {first_line}: cannot be read as JSON ({why})") from None


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    """Return an object of JSON. Raises ValueError for a key that occurs twice, of which ``json`` takes the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError(f"two values of {_repeated([key for key, _ in pairs])!r}")
    return row


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Raise UserError for two columns of one name."""
    if len(set(names)) < len(names):
        raise UserError(f"{path}: two columns have the name {_repeated(names)!r}; rename one")


def _repeated(names: Sequence[str]) -> str:
    """Return the first name that occurs twice."""
    return next(name for number, name in enumerate(names) if name in names[:number])


def _parse_csv(path: Path, text: str) -> list[Any]:
    """Return the rows of a table whose first line names the columns; every value is a text."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header, rows = next(lines, []), list[Any]()
        _check_columns(path, header)
        for cells in filter(None, lines):
            if len(cells) != len(header):
                raise UserError(
                    f"{path}, line {lines.line_num}: the row ends here with {len(cells)} cells, the header has "
                    f"{len(header)}"
                )
            rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.line_num}: not CSV ({error})") from None
    return rows


def read_parquet(path: Path) -> list[Any]:
    """Return the rows of a parquet file. Raises UserError."""
    parquet, arrow = _library("pyarrow.parquet", str(path)), _library("pyarrow", str(path))
    try:
        _check_columns(path, parquet.read_schema(path).names)
        rows: list[Any] = without_nulls(parquet.read_table(path, partitioning=None).to_pylist())
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None
    return rows


def without_nulls(rows: list[Any]) -> list[Any]:
    """Return the rows of a table without the nulls that Arrow adds to objects in lists, which all have the same keys
    there."""
    return [{name: _listed(value) for name, value in row.items()} for row in rows]


def _listed(value: Any, is_listed: bool = False) -> Any:
    if isinstance(value, list):
        return [_listed(each, True) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: _listed(each, is_listed) for key, each in value.items() if each is not None or not is_listed}


def is_saved_dataset(path: Path) -> bool:
    """Whether ``path`` is a directory that ``save_to_disk`` of datasets has written."""
    return any((path / name).is_file() for name in SAVED)


def read_directory(path: Path, split: str | None) -> list[Any]:
    """Return the rows of a directory that ``save_to_disk`` of datasets has written. Raises UserError."""
    datasets = _library("datasets", str(path))
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None
    if isinstance(loaded, Mapping):
        loaded = loaded[_split(loaded, split, str(path))]
    elif split is not None:
        raise UserError(f"{path}:{split}: the directory has no splits; remove :{split}")
    return without_nulls(list(loaded.to_list()))


def read_hub(name: HubName) -> list[Any]:
    """Return the rows of ``org/name``, ``org/name:split`` or ``org/name:config:split``. Raises UserError."""
    if len(name.parts) > 2:
        raise UserError(f"{':'.join((str(name), *name.parts))}: a data set's name is org/name:config:split at most")
    datasets = _library("datasets", str(name))
    snapshot = name.cached("dataset") or name.download("dataset", "data")
    config, split = (None, *name.parts)[-2:] if name.parts else (None, None)
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(str(snapshot), config)
    except (OSError, ValueError, LookupError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"cannot read {name}: {_first_line(error)}") from None
    return without_nulls(list(loaded[_split(loaded, split, str(name))].to_list()))


def _split(splits: Mapping[str, Any], split: str | None, name: str) -> str:
    """Return the split to read: the one named, else the only one, else the training rows."""
    if split is None and len(splits) == 1:
        return next(iter(splits))
    chosen = split or SPLIT
    if chosen not in splits:
        raise UserError(f"{name}: it has no split {chosen!r}{nearest(chosen, splits)}; it has {', '.join(splits)}")
    return chosen


def _library(name: str, path: str) -> Any:
    """Import a library of the extra. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{path}: needs {package}, which is not installed: pip install 'flexrlhf[data]'") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
