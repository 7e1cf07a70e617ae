"""Vocabulary of a tokenizer's directory, read from its files: which token has which id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flexrlhf.errors import UserError
from flexrlhf.weights.model_files import check_regular

WHOLE = "tokenizer.json"
TOKENIZER_FILES = (WHOLE, "vocab.json", "vocab.txt", "tokenizer.model")
"""Files of which a directory with a tokenizer has one."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a tokenizer, special and added ones among them. ``ids``: token → id."""

    ids: Mapping[str, int]

    @property
    def largest(self) -> int:
        """Largest id; -1 of no tokens."""
        return max(self.ids.values(), default=-1)

    @cached_property
    def tokens(self) -> dict[int, str]:
        """Return id → token."""
        return {number: token for token, number in self.ids.items()}

    def conflict(self, other: Vocabulary) -> str | None:
        """Return an example of what ``other`` reads differently, in words; None where there is nothing.

        Tokens that one of them has in addition, at ids that the other does not use, are no conflict.
        """
        moved = [token for token, number in self.ids.items() if other.ids.get(token, number) != number]
        if moved:
            token = max(moved, key=_is_word)
            return f"token {token!r} is {self.ids[token]} there and {other.ids[token]} here"
        for number, token in self.tokens.items():
            if other.tokens.get(number, token) != token:
                return f"id {number} is {token!r} there and {other.tokens[number]!r} here"
        return None


def _is_word(token: str) -> tuple[bool, int]:
    """Return what makes a token a good example: letters, and more of them."""
    plain = token.strip("▁Ġ #")
    return plain.isalpha() and plain.isascii(), min(len(plain), 8)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has files of a tokenizer."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def read_vocabulary(key: str, directory: Path) -> Vocabulary | None:
    """Return the vocabulary in a directory; None where its files have another form. ``key``: for messages.

    Raises UserError for files that cannot be read.
    """
    ids: dict[str, int] = {}
    if (directory / WHOLE).exists():
        content = _read(key, directory / WHOLE)
        ids |= _model_tokens(content) | dict(_entries(content.get("added_tokens")))
    else:
        for name in ("vocab.json", "added_tokens.json"):
            ids |= _numbered(_read(key, directory / name)) if (directory / name).exists() else {}
        if (directory / "vocab.txt").is_file():
            lines = (directory / "vocab.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            ids |= {token: number for number, token in enumerate(lines)}
    return Vocabulary(ids) if ids else None


def _read(key: str, file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    where = f"{key} {file.parent}"
    check_regular(where, file)
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {file.name} cannot be read as JSON ({str(error).splitlines()[0]})") from None
    return content if isinstance(content, dict) else {}


def _model_tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the model in a tokenizer.json: a mapping to ids, or a list of tokens with their scores."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        pieces = [entry[0] for entry in vocabulary if isinstance(entry, list) and entry]
        return {piece: number for number, piece in enumerate(pieces) if isinstance(piece, str)}
    return _numbered(vocabulary) if isinstance(vocabulary, dict) else {}


def _numbered(content: Mapping[str, Any]) -> dict[str, int]:
    return {token: number for token, number in content.items() if isinstance(number, int)}


def _entries(added: Any) -> Iterator[tuple[str, int]]:
    """Yield the tokens that a tokenizer.json lists next to those of its model."""
    for entry in added if isinstance(added, list) else ():
        token, number = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if isinstance(token, str) and isinstance(number, int):
            yield token, number
