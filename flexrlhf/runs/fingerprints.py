"""Digests of the files that a run reads: two machines with the same ones compute with the same weights and rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from os.path import realpath
from pathlib import Path

from flexrlhf.config.spec import Spec
from flexrlhf.plan.data_sources import data_sources
from flexrlhf.plan.plan import Plan

READ_SUFFIXES = frozenset({".json", ".jinja", ".model", ".py", ".safetensors", ".txt"})
"""Endings of the files of a model's directory that models and tokenizers are read from."""
BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 64
"""Parts of a larger file that are read: all weights of a model differ after one update."""
_DIGITS = 12


def input_digests(plans: Sequence[Plan]) -> dict[str, str]:
    """Return the digest of each file that ``plans`` read, by its setting and path.

    What an earlier run of the command writes, and so does not exist yet, has none.
    """
    found: dict[str, str] = {}
    for index, plan in enumerate(plans):
        written = [other.spec.directory for other in plans[:index]]
        for setting, path in _inputs(plan):
            place = Path(realpath(path))
            if not _is_below(path, written):
                found |= {f"{setting} {_name(path, file)}": file_digest(file) for file in _files(place)}
    return found


def written_inputs(spec: Spec, earlier: Sequence[Path]) -> list[Path]:
    """Return the directories of models and of the tokenizer of a run that are below those of ``earlier`` runs."""
    names = [*(model.path for _, model in spec.models if model is not None), spec.data.tokenizer]
    return list(dict.fromkeys(Path(name) for name in names if name is not None and _is_below(name, earlier)))


def _is_below(path: str, directories: Sequence[Path]) -> bool:
    return any(Path(realpath(path)).is_relative_to(realpath(each)) for each in directories)


def file_digest(path: Path) -> str:
    """Return a digest of a file's size and bytes; of a file of more than 64 MiB those of 64 blocks."""
    digest, size = hashlib.sha256(), path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= NUM_BLOCKS * BLOCK_BYTES:
            digest.update(file.read())
        else:
            for block in range(NUM_BLOCKS):
                file.seek((size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:_DIGITS]


def _inputs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield setting and path of the models, the tokenizer, the data and a graph's file of a run."""
    for role in plan.graph.roles:
        if (path := plan.model(role).path) is not None:
            yield f"models.{role}.path", path
    data = plan.spec.data
    for setting, name in (("data.tokenizer", data.tokenizer), ("data.chat_template", data.chat_template)):
        if name is not None:
            yield setting, name
    for source in data_sources(plan):
        yield source.setting, source.path
    for setting in ("graph", "loop"):
        file, _, _ = (getattr(plan.spec.algorithm, setting) or "").rpartition(":")
        if file.endswith(".py"):
            yield f"algorithm.{setting}", file


def _files(place: Path) -> list[Path]:
    """Return the file, or those of a directory that are read."""
    if place.is_dir():
        return sorted(each for each in place.iterdir() if each.suffix in READ_SUFFIXES and each.is_file())
    return [place] if place.is_file() else []


def _name(path: str, file: Path) -> str:
    return path if Path(realpath(path)) == file else str(Path(path) / file.name)
