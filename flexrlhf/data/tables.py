"""Rows of columnar files: parquet, a directory of ``datasets``, or a data set on the Hugging Face Hub.

pyarrow and datasets are an extra of the package, and are loaded where such a file is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexrlhf.data.hub import HubName, cached_snapshot, download_snapshot
from flexrlhf.errors import UserError, nearest

SAVED = ("state.json", "dataset_dict.json")
"""Files of which ``save_to_disk`` of datasets writes one."""
SPLIT = "train"
"""Split that is read where none is named."""


def read_parquet(path: Path) -> list[Any]:
    """Return the rows of a parquet file. Raises UserError."""
    parquet, arrow = _library("pyarrow.parquet", str(path)), _library("pyarrow", str(path))
    try:
        rows: list[Any] = parquet.read_table(path, partitioning=None).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None
    return rows


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
    return list(loaded.to_list())


def read_hub(name: HubName) -> list[Any]:
    """Return the rows of ``org/name``, ``org/name:split`` or ``org/name:config:split``. Raises UserError."""
    if len(name.parts) > 2:
        raise UserError(f"{':'.join((str(name), *name.parts))}: a data set's name is org/name:config:split at most")
    datasets = _library("datasets", str(name))
    snapshot = cached_snapshot(name, "dataset") or download_snapshot(name, "dataset", "data")
    config, split = (None, *name.parts)[-2:] if name.parts else (None, None)
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(str(snapshot), config)
    except (OSError, ValueError, LookupError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"cannot read {name}: {_first_line(error)}") from None
    return list(loaded[_split(loaded, split, str(name))].to_list())


def _split(splits: Mapping[str, Any], split: str | None, name: str) -> str:
    """Return the split to read: the one named, else the only one, else the training rows."""
    if split is None and len(splits) == 1:
        return next(iter(splits))
    chosen = split or SPLIT
    if chosen not in splits:
        raise UserError(f"{name}: it has no split {chosen!r}{nearest(chosen, splits)}; it has {', '.join(splits)}")
    return chosen


def _library(name: str, path: str) -> Any:
    """Import a library of the extra. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserError(f"{path}: needs {package}, which is not installed: pip install 'flexrlhf[data]'") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
