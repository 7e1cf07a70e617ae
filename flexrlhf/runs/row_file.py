"""Files of a run with a row in JSON for each step or event, such as ``metrics.jsonl``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexrlhf.runs.durable_files import WRITING, free_name

_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class RowFile:
    """A jsonl file of a run, which need not be there."""

    path: Path

    def read(self) -> list[dict[str, Any]]:
        """Return the rows; none when the run did not write the file."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row at its end."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def trim(self, key: str, limit: int) -> None:
        """Keep the rows with a ``key`` below ``limit``; a row that was cut in writing is dropped."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines(keepends=True) if _number(line, key) < limit]
        fresh = self.path.with_name(self.path.name + WRITING)
        fresh.write_text("".join(kept))
        fresh.replace(self.path)

    def below(self, key: str, limit: int) -> set[int]:
        """Return the values of ``key`` below ``limit``."""
        lines = self.path.read_text(errors="replace").splitlines() if self.path.is_file() else []
        return {int(number) for line in lines if (number := _number(line, key)) < limit}

    def writer(self) -> RowWriter:
        """Return a writer for the only process that appends to this file."""
        return RowWriter(self.path)


def _number(line: str, key: str) -> float:
    try:
        return float(json.loads(line)[key])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class RowWriter:
    """A jsonl file of a run that this process alone appends to.

    It stays open: if it is removed or replaced meanwhile, the rows so far are written again, and another file in its
    place gets another name. Rows that are cut off are lost. All of that is printed.
    """

    def __init__(self, path: Path) -> None:
        """Create nothing yet: the first row does."""
        self._path = path
        self._descriptor: int | None = None
        self._size = 0

    def append(self, text: str) -> None:
        """Write ``text`` at its end."""
        if self._descriptor is None:
            self._descriptor = self._opened()
        else:
            self._descriptor = self._kept(self._descriptor)
        self._write(self._descriptor, text.encode())

    def close(self) -> None:
        """Close it; a further row opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        descriptor = os.open(str(self._path), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._size = os.fstat(descriptor).st_size
        return descriptor

    def _kept(self, descriptor: int) -> int:
        """Return the descriptor of the file, written again if it is no longer at its path."""
        mine, found = os.fstat(descriptor), self._path.stat() if os.path.lexists(self._path) else None
        if found is not None and os.path.samestat(mine, found):
            if mine.st_size < self._size:
                lost = self._size - mine.st_size
                self._print(f"{lost} of its {self._size} bytes were cut off; these rows are lost")
                self._size = mine.st_size
            return descriptor
        became = "removed"
        if found is not None:
            other = free_name(self._path)
            self._path.rename(other)
            became = f"replaced by another file, now {other.name}"
        fresh = self._opened()
        for place in range(0, mine.st_size, _COPIED_BYTES):
            self._write(fresh, os.pread(descriptor, _COPIED_BYTES, place))
        os.close(descriptor)
        self._print(f"was {became}; it is written again with the rows so far")
        return fresh

    def _write(self, descriptor: int, data: bytes) -> None:
        self._size += len(data)
        while data:
            data = data[os.write(descriptor, data) :]

    def _print(self, sentence: str) -> None:
        print(f"flexrlhf: {self._path}: {sentence}", file=sys.stderr, flush=True)
