"""Check of the files that a command will write, before it prints or computes anything."""

from __future__ import annotations

import os
from pathlib import Path

from flexrlhf.errors import UserError


def check_output(path: Path, option: str, such_as: str, makes_directories: bool = False) -> None:
    """Raise UserError where ``path`` could not be written in the end.

    option:             the command line's option that names ``path``, for the message
    such_as:            an example of a file name, where ``path`` is a directory
    makes_directories:  whether the command makes missing directories
    """
    if path.is_dir():
        raise UserError(f"{option} {path}: a directory; give a file, such as {path / such_as}")
    nearest = _nearest(path)
    if not path.exists() and not nearest.is_dir():
        raise UserError(f"{option} {path}: {nearest} is a file, not a directory")
    if not makes_directories and not path.parent.is_dir():
        raise UserError(f"{option} {path}: cannot be written (No such file or directory: {path.parent})")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{option} {path}: no permission to write {'in ' * nearest.is_dir()}{nearest}")


def check_output_directory(path: Path, option: str) -> None:
    """Raise UserError where a directory could not be made at ``path``, or nothing could be written in it."""
    nearest = _nearest(path)
    if not nearest.is_dir():
        raise UserError(f"{option} {path}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{option} {path}: no permission to write in {nearest}")


def _nearest(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
