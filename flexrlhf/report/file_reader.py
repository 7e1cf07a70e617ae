"""Reader of the files of a run: what is damaged in one becomes a sentence, and the rest of it is used."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flexrlhf.api import counted, one_line

LONGEST_LINE = 1 << 26
"""Bytes of a row; a longer one is damaged, and is not read as a whole."""
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError)
"""Errors of code that reads what no run has written."""
LineFields = Mapping[str, Any]
Read = TypeVar("Read")


def without_surrogates(text: str) -> str:
    """Return ``text`` with halves of a pair of surrogates, which no file can have, replaced by U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def read_json(content: bytes) -> Any:
    """Return a value of a file. Raises ValueError if it is no JSON."""
    try:
        value = json.loads(content.decode(errors="replace"))
        return _without_surrogates(value) if b"\\ud" in content.lower() else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return without_surrogates(value)
        case list():
            return [_without_surrogates(each) for each in value]
        case dict():
            return {without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    return value


@dataclass
class RowReader:
    """Rows of a jsonl file, read anew in each pass: a long run has more than the memory.

    path:     of the file
    form:     of a row; another one is damaged
    damaged:  damaged rows of the last pass
    """

    path: Path
    form: TypeAdapter[Any]
    damaged: int = 0

    def __iter__(self) -> Iterator[LineFields]:
        """Yield the rows in order, without damaged ones and without a last one that is being written."""
        self.damaged = 0
        for line, is_whole in _lines(self.path):
            try:
                row = self.form.validate_python(read_json(line))
            except ValueError as error:
                # a row that is being written is no JSON
                self.damaged += is_whole or isinstance(error, ValidationError)
            else:
                yield row


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines that are not empty and whether each has an end; one that is too long as an empty one."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            is_whole = line.endswith(b"\n")
            if len(line) == LONGEST_LINE and not is_whole:
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                yield b"", True
            elif line.strip():
                yield line, is_whole


@dataclass
class FileReader:
    """Reader of one run's directory.

    directory:  of the run
    notes:      sentences on what is missing or damaged
    damage:     the notes on what is damaged
    """

    directory: Path
    notes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    def damaged(self, sentence: str) -> None:
        """Note that a file is damaged."""
        self.notes.append(sentence)
        self.damage.append(sentence)

    def value(self, name: str, read: Callable[[Path], Read], default: Read) -> Read:
        """Return ``read`` of a file; ``default`` without one, or, with a sentence, if that raises."""
        path = self.directory / name
        if not path.is_file():
            if os.path.lexists(path):
                self.damaged(f"{path} is no file")
            return default
        try:
            return read(path)
        except DAMAGE as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {_first_line(error)}"
            self.damaged(f"{path} cannot be read ({reason})")
            return default

    def rows(self, name: str, form: TypeAdapter[Any], take: Callable[[RowReader], Read], default: Read) -> Read:
        """Return ``take`` of the rows of a jsonl file, with a sentence on damaged rows; ``default`` where it cannot be
        read."""
        file = RowReader(self.directory / name, form)
        taken = self.value(name, lambda _: take(file), default)
        if file.damaged:
            verb = "is" if file.damaged == 1 else "are"
            self.damaged(f"{counted(file.damaged, 'damaged line')} of {file.path} {verb} left out")
        return taken


def _first_line(error: Exception) -> str:
    """Return the reason of an error; of a form its place and its first problem."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        return one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    return one_line(str(error))
