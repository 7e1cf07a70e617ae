"""Safetensors files: of any tensors, and of a checkpoint, where each rank writes its pieces of a model's tensors."""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flexrlhf.comm.weights import fill
from flexrlhf.errors import UserError
from flexrlhf.runs.durable_files import FileEntry, sync_to_disk
from flexrlhf.weights.shards import Part

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""Number of the system's error in the text of one of safetensors."""


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors itself lets nobody else read it.

    metadata:  texts of its header; None: the one that transformers looks for.

    Raises OSError if the file system fails.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"} if metadata is None else dict(metadata))
    except SafetensorError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from None
    file.chmod(mode)


@dataclass(frozen=True)
class Piece:
    """Piece of a tensor.

    values:  of any shape.
    part:    of the tensor that they are.
    """

    values: Tensor
    part: Part

    @staticmethod
    def key(kind: str, name: str) -> str:
        """Return the key of a tensor: its kind, then the parameter's Hugging Face name."""
        return f"{kind}/{name}"


def piece_file(model: str, rank: int) -> str:
    """Return the name of the file with the pieces of a placed model that ``rank`` writes."""
    return f"{model}-{rank:05d}.safetensors"


def write_pieces(path: Path, pieces: Mapping[str, Piece]) -> FileEntry:
    """Write ``pieces`` by key, on disk when this returns."""
    metadata = {key: piece.part.text for key, piece in pieces.items()}
    return write_tensors(path, {key: piece.values.reshape(-1) for key, piece in pieces.items()}, metadata)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> FileEntry:
    """Write a safetensors file, on disk when this returns."""
    save_tensors(tensors, path, metadata or {})
    sync_to_disk(path)
    return FileEntry.of(path)


@dataclass(frozen=True)
class PieceReader:
    """Tensors of one placed model in a checkpoint, assembled from the pieces in all of its files.

    directory:  the checkpoint.
    model:      name of the placed model.
    """

    directory: Path
    model: str

    @cached_property
    def pieces(self) -> Mapping[str, list[tuple[Path, Part]]]:
        """Key of a tensor (kind and name) → files with pieces of it."""
        index: dict[str, list[tuple[Path, Part]]] = defaultdict(list)
        for path in sorted(self.directory.glob(f"{self.model}-[0-9]*.safetensors")):
            with _opened(path) as file:
                for key, part in (file.metadata() or {}).items():
                    index[key].append((path, Part.load(part)))
        return index

    def read(self, key: str, part: Part) -> Tensor:
        """Return the values of ``part`` of the tensor ``key`` as a vector, on the CPU.

        Raises UserError if the checkpoint lacks the tensor, or has one of another shape.
        """
        pieces = self.pieces.get(key, [])
        shapes = {stored.shape for _, stored in pieces}
        if shapes != {part.shape}:
            found = ", ".join(str(list(shape)) for shape in sorted(shapes)) or "nothing"
            raise UserError(
                f"checkpoint {self.directory}: {self.model} needs {key} of shape {list(part.shape)}, found {found}"
            )
        if not Part.cover([stored for _, stored in pieces], part.shape):
            raise UserError(f"checkpoint {self.directory}: {key} of {self.model} is there in part only")
        return self._assemble(key, pieces, part)

    def tensor(self, key: str) -> Tensor:
        """Return the whole tensor ``key``."""
        shape = self.pieces[key][0][1].shape
        return self.read(key, Part.whole(shape)).view(shape)

    def _assemble(self, key: str, pieces: list[tuple[Path, Part]], part: Part) -> Tensor:
        alone = [path for path, stored in pieces if stored == part]
        if alone:
            return _read(alone[0], key)
        tensor: Tensor | None = None
        for path, stored in pieces:
            if not stored.may_overlap(part):
                continue
            values = _read(path, key)
            tensor = values.new_empty(part.shape) if tensor is None else tensor
            fill(tensor, stored, values)
        return cut(tensor, part) if tensor is not None else torch.empty(0)


def _read(path: Path, key: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"checkpoint file {path}: cannot be read ({str(error).splitlines()[0]})") from None


def cut(tensor: Tensor, part: Part) -> Tensor:
    """Return the elements of ``part`` of a whole ``tensor`` as a vector."""
    box = tensor[tuple(slice(side.start, side.stop) for side in part.box)].reshape(-1)
    return box if part.flat is None else box[part.flat.start : part.flat.stop]
