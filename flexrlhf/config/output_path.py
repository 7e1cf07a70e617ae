"""Files that a command writes: checks before its work, and writing at its end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flexrlhf.errors import UserError


@dataclass(frozen=True)
class OutputPath:
    """File or directory that a command writes.

    path:    its path
    option:  the command line's option that names it, for messages
    """

    path: Path
    option: str

    def check_file(
        self,
        such_as: str,
        is_own: Callable[[str], bool],
        inputs: Iterable[Path | None] = (),
        makes_directories: bool = False,
    ) -> None:
        """Raise UserError where the file could not be written in the end, or another one would be lost.

        such_as:            an example of a file name, where the path is a directory
        is_own:             whether a text was written by the same command, so that it may be replaced
        inputs:             files that the command reads; it replaces none of them
        makes_directories:  whether the command makes missing directories
        """
        if self.path.is_dir():
            raise UserError(f"{self.option} {self.path}: a directory; give a file, such as {self.path / such_as}")
        nearest = _nearest(self.path)
        if not self.path.exists() and not nearest.is_dir():
            raise UserError(f"{self.option} {self.path}: {nearest} is a file, not a directory")
        if not makes_directories and not self.path.parent.is_dir():
            raise UserError(
                f"{self.option} {self.path}: cannot be written (No such file or directory: {self.path.parent})"
            )
        if not os.access(nearest, os.W_OK):
            raise UserError(f"{self.option} {self.path}: no permission to write {'in ' * nearest.is_dir()}{nearest}")
        if nearest.is_dir():
            _try_directory(self.path, self.option, nearest)
        if self.path.is_file():
            _check_replaced(self.path, self.option, is_own, inputs)

    def check_directory(self) -> None:
        """Raise UserError if a directory could not be made at the path, or nothing could be written in it."""
        nearest = _nearest(self.path)
        if not nearest.is_dir():
            raise UserError(f"{self.option} {self.path}: {nearest} is a file, not a directory")
        if not os.access(nearest, os.W_OK):
            raise UserError(f"{self.option} {self.path}: no permission to write in {nearest}")
        _try_directory(self.path, self.option, nearest)

    def write(self, text: str) -> None:
        """Write ``text`` to the file, whole or not at all. Raises UserError."""
        content = text.encode()
        try:
            if self.path.exists() and not (self.path.is_file() and os.access(self.path.resolve().parent, os.W_OK)):
                self.path.write_bytes(content)
            else:
                _replace(self.path.resolve(), content)
        except OSError as error:
            raise UserError(f"{self.option} {self.path}: cannot be written ({error.strerror})") from None


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
