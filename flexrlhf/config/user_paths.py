"""Paths as a user writes them, and names instead of a missing one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from flexrlhf.config.secrets import without_secrets
from flexrlhf.errors import near_name, shown, some_of


def user_path(path: str) -> str:
    """Return ``path`` with ``~`` or ``~name`` at its start replaced by that home directory.

    Raises ValueError for an empty one, which would be the current directory, and for an address.
    """
    if not path.strip():
        raise ValueError(f"expected a path or a name, found {shown(path)}")
    if "://" in path:
        raise ValueError(f"expected a path or a name, found an address, {shown(without_secrets(path))}; download it")
    return os.path.expanduser(path)


UserPath = Annotated[str, AfterValidator(user_path)]
"""A file or directory on the machine that reads the YAML, or a name on the Hub, which has no ``~``."""


def instead_of(path: Path, *endings: str) -> str:
    """Return the end of a message about a missing ``path``: what it is, or the nearest name or all names there.

    endings:  of names of files such as the missing one; none: a directory is missing.
    """
    parent = path.parent
    if path.exists():
        return f": it is {'a directory' if path.is_dir() else 'a file' if path.is_file() else 'a pipe or a device'}"
    if path.is_symlink():
        return f": a link to {os.readlink(path)}, which is not there"
    if not parent.is_dir():
        return f": the directory {parent} does not exist"
    if not os.access(parent, os.R_OK | os.X_OK):
        return f": no permission to read {parent}"
    such = (other for other in parent.iterdir() if (other.name.endswith(endings) if endings else other.is_dir()))
    names = sorted(other.name for other in such if not other.name.startswith("."))
    meant = near_name(f"{parent}/{path.name}", [f"{parent}/{name}" for name in names])
    if meant is not None:
        return f" (did you mean {str(Path(meant))!r}?)"
    where = "the current directory" if str(parent) == "." else str(parent)
    return f"; {where} has {some_of(names) or 'none'}"
