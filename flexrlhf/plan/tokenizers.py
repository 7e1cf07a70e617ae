"""Whether the tokenizers of a run agree: one tokenizer's ids are another text to a model of another vocabulary.

Every role is compared with the tokenizer of the run, by the files of both; a directory without a tokenizer has only the
size of its vocabulary. A model of scores with ``retokenize`` reads texts by its own tokenizer instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from filecmp import cmp
from functools import cached_property
from os.path import realpath
from pathlib import Path
from typing import Any

from flexrlhf.config.model_settings import ModelSpec
from flexrlhf.config.spec import Spec
from flexrlhf.errors import UserError
from flexrlhf.operators.graph import Graph
from flexrlhf.plan.models import origins_first
from flexrlhf.plan.score_sources import is_scorer
from flexrlhf.weights.model_files import check_regular
from flexrlhf.weights.shapes import read_config
from flexrlhf.weights.stored_model import StoredModel

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
        """Return an example of a token that ``other`` reads differently, in words; None if there is none.

        Tokens that one of them has in addition, at ids that the other does not use, are no conflict.
        """
        moved = [token for token, number in self.ids.items() if other.ids.get(token, number) != number]
        if moved:
            token = max(moved, key=_legibility)
            return f"token {token!r} is {self.ids[token]} there and {other.ids[token]} here"
        for number, token in self.tokens.items():
            if other.tokens.get(number, token) != token:
                return f"id {number} is {token!r} there and {other.tokens[number]!r} here"
        return None


def _legibility(token: str) -> tuple[bool, int]:
    """Return the key by which tokens are compared as examples: words before others, then the longer one."""
    plain = token.strip("▁Ġ #")
    return plain.isalpha() and plain.isascii(), min(len(plain), 8)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has files of a tokenizer."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def read_vocabulary(key: str, directory: Path) -> Vocabulary | None:
    """Return the vocabulary in a directory; None if its files have another form. ``key``: for messages.

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


def tokenizer_source(spec: Spec, graph: Graph) -> tuple[str, str] | None:
    """Return the setting that names the tokenizer of a run, and its directory; None if nothing names one.

    It is ``data.tokenizer``, else the path of the first model that has one.
    """
    if spec.data.tokenizer is not None:
        return "data.tokenizer", spec.data.tokenizer
    models = ((role, spec.models.of(role)) for role in graph.roles)
    paths = ((role, model.path) for role, model in models if model is not None and model.path is not None)
    return next(((f"models.{role}.path", path) for role, path in paths), None)


def tokenizer_of(role: str, model: ModelSpec) -> Path | None:
    """Return the directory with the tokenizer of a model: its own, else that of the model under its adapters."""
    paths = (model.path, StoredModel.of(role, model).whole.path)
    return next((Path(path) for path in paths if path is not None and has_tokenizer(Path(path))), None)


def check_tokenizers(spec: Spec, graph: Graph, pending: Collection[Path]) -> None:
    """Raise UserError for a role that reads other texts in the ids of the run's tokenizer, and for one that has none to
    retokenize with. ``pending``: directories that an earlier run of the command is to write.
    """
    owner = tokenizer_source(spec, graph)
    if owner is not None and (Path(realpath(owner[1])) in pending or not Path(owner[1]).is_dir()):
        owner = None
    for role in origins_first(graph):
        model = spec.models.of(role)
        if model is None or (model.path is not None and Path(realpath(model.path)) in pending):
            continue
        if model.retokenize:
            if tokenizer_of(role, model) is None:
                raise UserError(
                    f"models.{role}.retokenize: {model.path or 'a model without a path'} has no tokenizer; give a path "
                    f"with that of the model"
                )
        elif model.path is not None and owner is not None:
            _check_role(role, model, owner, may_retokenize=is_scorer(role) and role not in graph.trained)


def _check_role(role: str, model: ModelSpec, owner: tuple[str, str], may_retokenize: bool) -> None:
    """Compare a role with the tokenizer of the run, ``owner``: its setting and directory."""
    (key, path), own = owner, tokenizer_of(role, model)
    name = key.removesuffix(".path") if key.endswith(".path") else f"{key} {path}"
    whole = tokenizer_of("", ModelSpec(path=path)) or Path(path)
    vocabulary = read_vocabulary("data.tokenizer", whole)
    if vocabulary is None:
        return
    _check_size(role, model, vocabulary)
    if own is None or realpath(own) == realpath(whole) or _is_same(own / WHOLE, whole / WHOLE):
        return
    read = read_vocabulary(f"models.{role}.path", own)
    if read is not None and (example := vocabulary.conflict(read)) is not None:
        raise UserError(
            f"models.{role}: its tokenizer ({own}) has other ids than that of {name} ({example}), so it would read "
            f"other texts; {_remedy(role, str(own), name, may_retokenize)}"
        )


def _is_same(first: Path, second: Path) -> bool:
    """Whether both files exist and have the same bytes."""
    return first.is_file() and second.is_file() and cmp(first, second, shallow=False)


def _check_size(role: str, model: ModelSpec, vocabulary: Vocabulary) -> None:
    """Raise UserError for a model without an embedding for every token."""
    config = read_config(role, model)
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    if isinstance(size, int) and size <= vocabulary.largest:
        raise UserError(
            f"models.{role}: vocab_size {size} is smaller than the {vocabulary.largest + 1} tokens of the tokenizer"
        )


def _remedy(role: str, own: str, name: str, may_retokenize: bool) -> str:
    """Return the remedy: other files, or responses that are encoded again."""
    if may_retokenize:
        return f"set models.{role}.retokenize: true, or give a model with the tokenizer of {name.split()[0]}"
    if name.startswith("data."):
        return f"set data.tokenizer to {own}, or give a model with that tokenizer"
    return f"give a model with the tokenizer of {name}"
