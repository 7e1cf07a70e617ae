"""Check of the files that a command will write, before it prints or computes anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from flexrlhf.errors import UserError


def check_output(
    path: Path,
    option: str,
    such_as: str,
    is_own: Callable[[str], bool],
    inputs: Iterable[Path | None] = (),
    makes_directories: bool = False,
) -> None:
    """Raise UserError where ``path`` could not be written in the end, or is a file that would be lost.

    option:             the command line's option that names ``path``, for the message
    such_as:            an example of a file name, where ``path`` is a directory
    is_own:             whether a text was written by the same command, so that it may be replaced
    inputs:             files that the command reads; it replaces none of them
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
    if path.is_file():
        _check_replaced(path, option, is_own, inputs)


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


def _check_replaced(path: Path, option: str, is_own: Callable[[str], bool], inputs: Iterable[Path | None]) -> None:
    """Raise UserError for an existing file that is read by the command, or that another one has written."""
    if any(source is not None and source.exists() and source.samefile(path) for source in inputs):
        raise UserError(f"{option} {path}: is read by this command, which would replace it; give another file")
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"{option} {path}: exists and cannot be read ({error.strerror}); give another file") from None
    if not is_own(text):
        raise UserError(f"{option} {path}: exists and was not written by this command; give another file, or remove it")
