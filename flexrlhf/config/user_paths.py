"""Paths as a user writes them: names instead of a missing one, and checks of files that a command will write."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from flexrlhf.config.secrets import without_secrets
from flexrlhf.errors import UserError, near_name, shown, some_of


def in_home(path: str) -> str:
    """Return ``path`` with ``~`` or ``~name`` at its start replaced by that home directory; other texts as they are."""
    return os.path.expanduser(path)


def user_path(path: str) -> str:
    """Return ``path`` as ``in_home`` does. Raises ValueError for an empty one, which would be the current directory,
    and for an address."""
    if not path.strip():
        raise ValueError(f"expected a path or a name, found {shown(path)}")
    if "://" in path:
        raise ValueError(f"expected a path or a name, found an address, {shown(without_secrets(path))}; download it")
    return in_home(path)


UserPath = Annotated[str, AfterValidator(user_path)]
"""A file or directory on the machine that reads the YAML, or a name on the Hub, which has no ``~``."""


def is_yaml(path: Path) -> bool:
    """Return whether a name is that of a YAML file."""
    return path.suffix in (".yaml", ".yml")


def is_json(path: Path) -> bool:
    """Return whether a name is that of a JSON file."""
    return path.suffix == ".json"


def instead_of(path: Path, is_such: Callable[[Path], bool]) -> str:
    """Return the end of a message about a missing ``path``: what it is, or the nearest name or all names there.

    is_such:  whether a file or directory is of the kind that is missing.
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
    names = sorted(other.name for other in parent.iterdir() if is_such(other) and not other.name.startswith("."))
    meant = near_name(f"{parent}/{path.name}", [f"{parent}/{name}" for name in names])
    if meant is not None:
        return f" (did you mean {str(Path(meant))!r}?)"
    where = "the current directory" if str(parent) == "." else str(parent)
    return f"; {where} has {some_of(names) or 'none'}"


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
    if nearest.is_dir():
        _try_directory(path, option, nearest)
    if path.is_file():
        _check_replaced(path, option, is_own, inputs)


def write_output(path: Path, option: str, text: str) -> None:
    """Write ``text`` to a file, whole or not at all. Raises UserError.

    option:  the command line's option that names ``path``, for the message
    """
    content = text.encode()
    try:
        if path.exists() and not (path.is_file() and os.access(path.resolve().parent, os.W_OK)):
            path.write_bytes(content)
        else:
            _replace(path.resolve(), content)
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror})") from None


def _replace(path: Path, content: bytes) -> None:
    """Give ``path`` another content, by a file next to it that takes its place."""
    fresh = path.with_name(f".{os.getpid()}.writing")
    try:
        fresh.write_bytes(content)
        if path.exists():
            shutil.copymode(path, fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def check_output_directory(path: Path, option: str) -> None:
    """Raise UserError if a directory could not be made at ``path``, or nothing could be written in it."""
    nearest = _nearest(path)
    if not nearest.is_dir():
        raise UserError(f"{option} {path}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"{option} {path}: no permission to write in {nearest}")
    _try_directory(path, option, nearest)


def _try_directory(path: Path, option: str, directory: Path) -> None:
    """Raise UserError for a directory that takes no file, such as one of /proc, whatever its permissions say."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(f"{option} {path}: cannot be written ({error.strerror}: {directory})") from None


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
