"""Temporary directories of processes that may be killed: a later start removes them. The standard library alone."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX, _LOCK = "flexrlhf-", ".locked-by-process"
"""Beginning of the names of temporary directories, and the file in each that its process has locked: a run's directory
has none of this name."""


@contextmanager
def process_directory() -> Iterator[Path]:
    """Yield a temporary directory of this process; the ones whose processes were killed are removed first.

    A process has the lock of its directory until it ends, however that is. Others' are their users' to remove, and a
    fork of the process removes none.
    """
    process = os.getpid()
    place = Path(gettempdir())
    for left in place.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            with left.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
        except OSError:
            continue
    with TemporaryDirectory(prefix=f".{_PREFIX}", ignore_cleanup_errors=True) as made:
        directory = Path(made).with_name(Path(made).name.removeprefix("."))
        with (Path(made) / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # nobody finds it before it is locked
            Path(made).rename(directory)
            try:
                yield directory
            finally:
                if os.getpid() == process:
                    directory.rename(made)
