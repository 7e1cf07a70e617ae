"""Files and directories that get their name once they are whole, and that are on disk when a call returns."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

ABANDONED = ".abandoned"
"""Ends the name of a checkpoint that is newer than the one that a run went on from, or damaged, until the run has
written one as new."""
WRITING = ".writing"
"""Ends the name of a file or directory that is not whole yet."""


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file of a checkpoint.

    num_bytes:  its size
    sha256:     hexadecimal digest of its contents
    """

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Return the entry of a file."""
        return cls(path.stat().st_size, file_checksum(path))


def file_checksum(path: Path) -> str:
    """Return the sha256 digest of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, contents: bytes) -> FileEntry:
    """Write a file that is on disk when this returns. Returns its size and checksum."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(contents), hashlib.sha256(contents).hexdigest())


def sync_to_disk(path: Path) -> None:
    """Put a file on disk, or the names in a directory, such as a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(fresh: Path, directory: Path) -> None:
    """Give a filled directory its final name, in the place of the one that has it."""
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def free_name(path: Path) -> Path:
    """Return the first of ``<path>.1``, ``<path>.2`` ... that is free; of an abandoned checkpoint ``path``, if free."""
    if not path.exists() and path.name.endswith(ABANDONED):
        return path
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())
