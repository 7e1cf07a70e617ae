"""Paths as a user writes them, and what is there instead of a missing one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from flexrlhf.errors import near_name, some_of


def in_home(path: str) -> str:
    """Return ``path`` with ``~`` or ``~name`` at its start replaced by that home directory; other texts as they are."""
    return os.path.expanduser(path)


UserPath = Annotated[str, AfterValidator(in_home)]
"""A file or directory on the machine that reads the YAML, or a name on the Hub, which has no ``~``."""


def is_yaml(path: Path) -> bool:
    """Return whether a name is that of a YAML file."""
    return path.suffix in (".yaml", ".yml")


def is_json(path: Path) -> bool:
    """Return whether a name is that of a JSON file."""
    return path.suffix == ".json"


def instead_of(path: Path, is_such: Callable[[Path], bool]) -> str:
    """Return what a message about a missing ``path`` ends with: the nearest name in its directory, else those in it.

    is_such:  whether a file or directory is of the kind that is missing.
    """
    parent = path.parent
    if path.is_symlink():
        return f": a link to {os.readlink(path)}, which is not there"
    if not parent.is_dir():
        return f": the directory {parent} does not exist"
    if not os.access(parent, os.R_OK | os.X_OK):
        return f": no permission to read {parent}"
    names = sorted(other.name for other in parent.iterdir() if is_such(other) and not other.name.startswith("."))
    meant = near_name(f"{parent}/{path.name}", [f"{parent}/{name}" for name in names])
    if meant is not None:
        return f" (did you mean {str(Path(meant))!r}?)"
    where = "the current directory" if str(parent) == "." else str(parent)
    return f"; {where} has {some_of(names) or 'none'}"
