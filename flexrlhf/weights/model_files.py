"""Weight files of a model, read by their headers alone: name, shape and type of every tensor.

A file that cannot be read, is cut or is no safetensors file raises UserError, before a rank starts.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from flexrlhf.config.model_settings import Dtype
from flexrlhf.errors import UserError, some_of
from flexrlhf.weights.parameters import ParameterName

SCALAR_BIAS = "score.bias"
FLOATS = ("F32", "F16", "BF16", "F64")
"""Types of weights that are loaded; others are of quantised models or masks."""
NOT_PARAMETERS = (r"rotary_emb\.", r"\.[kv]_scale$", r"(^|\.)masked_bias$")
"""Expressions of names of tensors that a model needs not: buffers that its config gives, and scales of caches."""
BLOCK_BYTES = 1 << 24
"""Bytes of a tensor that are read at a time, unless a row of it has more."""
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64} | {
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
}
_TYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16"}
"""Type of a file's tensors as safetensors names it."""
_LONGEST_HEADER = 100_000_000
"""Most bytes of a header that safetensors itself reads."""
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    shape:  its sizes.
    dtype:  its type, as safetensors names it.
    file:   the file.
    start:  place of its first byte in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int


class StoredTensors(dict[str, StoredTensor]):
    """Tensors of the files of a model, by name."""

    @classmethod
    def read(cls, where: str, file: Path) -> StoredTensors:
        """Return the tensors of one file: 8 bytes little-endian length, JSON of that length, then the numbers."""
        check_regular(where, file)
        try:
            size = file.stat().st_size
            with file.open("rb") as stream:
                start = stream.read(len(_POINTER))
                _check_start(f"{where}: {file.name}", start, size)
                (length,) = struct.unpack("<Q", start[:8])
                if length > min(size - 8, _LONGEST_HEADER):
                    raise UserError(
                        f"{where}: {file.name} is cut or no safetensors file: {size} bytes, and its header should have "
                        f"{length}; copy it again"
                    )
                stream.seek(8)
                text = stream.read(length)
        except OSError as error:
            raise UserError(f"{where}: {file.name} cannot be read ({error.strerror})") from None
        entries = _entries(f"{where}: {file.name}", text, size - 8 - length)
        return cls(
            (name, StoredTensor(tuple(entry["shape"]), entry["dtype"], file, 8 + length + entry["data_offsets"][0]))
            for name, entry in entries.items()
        )

    @property
    def common_type(self) -> Dtype:
        """Type that all tensors of a model's files have, but for biases of routers; float32 for several
        types, or float64."""
        types = {tensor.dtype for name, tensor in self.items() if not ParameterName(name).is_router_bias}
        return _TYPES.get(types.pop(), "float32") if len(types) == 1 else "float32"

    def named_as(self, expected: Collection[str]) -> StoredTensors:
        """Return the tensors under the names of the model: a base model is saved without the prefix of its heads'
        model."""
        names = set(expected)
        lacking = {name.partition(".")[0] for name in names - set(self)} - {name.partition(".")[0] for name in self}
        renamed = {f"{prefix}.{name}": name for prefix in lacking for name in self if f"{prefix}.{name}" in names}
        return StoredTensors({**self, **{name: self[old] for name, old in renamed.items()}})

    def check(
        self,
        key: str,
        expected: Mapping[str, tuple[int, ...]],
        optional: Collection[str] = (),
        by: str = "its config.json",
    ) -> None:
        """Raise UserError where files lack parameters that a model has, or have them in another shape or type.

        expected:  shapes by name, under transformers' names.
        optional:  names that files may lack: they are then initialised at random.
        by:        what gives the shapes, for the message.
        """
        found = self.named_as(expected)
        missing = sorted(set(expected) - set(found) - set(optional))
        if ParameterName.SCALAR_HEAD in expected:
            found.check_scalar_head(key, ParameterName.SCALAR_HEAD not in missing or len(missing) > 1)
        self.check_none_missing(key, missing)
        for name in sorted(set(expected) & set(found)):
            shape = found[name].shape
            if shape != tuple(expected[name]):
                raise UserError(
                    f"{key}: {name} is {list(shape)} in its files and {list(expected[name])} by {by}; "
                    f"correct one or the other"
                )
            if found[name].dtype not in FLOATS:
                raise UserError(
                    f"{key}: {name} is of type {found[name].dtype} in its files; save the model as "
                    f"{', '.join(FLOATS[:3])}"
                )

    def check_left_over(
        self, key: str, expected: Collection[str], config: Mapping[str, Any], ignored: Iterable[str] = ()
    ) -> None:
        """Raise UserError for a layer, or another part of the model, that its files have and its config does not.

        Left alone are tensors outside of the model's own modules, heads that are not used, layers that predict further
        tokens (``num_nextn_predict_layers``), and names in which an expression of ``ignored`` is found.
        """
        layers = {number for name in expected if (number := _layer_of(name)) is not None}
        last, further = max(layers, default=-1), config.get("num_nextn_predict_layers")
        predicting = range(last + 1, last + 1 + further) if layers and isinstance(further, int) else range(0)
        noise = re.compile("|".join((*NOT_PARAMETERS, *ignored)))
        left = sorted(
            name for name in _of_model(self, expected) if _layer_of(name) not in predicting and not noise.search(name)
        )
        beyond = [number for name in left if (number := _layer_of(name)) is not None and layers and number > last]
        if beyond:
            raise UserError(
                f"{key}: the files have weights of layer {min(beyond)}, which the config does not have; correct the "
                f"number of layers in its config.json, found {last + 1}, or copy the model again"
            )
        if left:
            raise UserError(
                f"{key}: its files have {some_of(left, 3)}, which the model of its config.json has not; correct one or "
                f"the other"
            )

    def check_scalar_head(self, key: str, may_lack: bool) -> None:
        """Raise UserError for a scalar head of several outputs or with a bias, and where there is none unless the model
        ``may_lack`` it.

        ``key``: ``models.ROLE.path DIRECTORY``.
        """
        head = self.get(ParameterName.SCALAR_HEAD)
        if head is None and not may_lack:
            raise UserError(_no_scalar_head(key))
        if head is not None and head.shape[:1] != (1,):
            raise UserError(
                f"{key}: its head has {head.shape[0] if head.shape else 0} labels (shape {list(head.shape)}); a model "
                f"of scores has one"
            )
        if head is not None and SCALAR_BIAS in self:
            raise UserError(
                f"{key}: its head has a bias, which a sequence classifier of transformers does not; train a model of "
                f"scores with algorithm reward, or remove the bias from its files, which changes no comparison "
                f"of scores"
            )

    @staticmethod
    def check_none_missing(key: str, missing: list[str]) -> None:
        """Raise UserError for files without the weights ``missing``, if there are any."""
        if missing == [ParameterName.SCALAR_HEAD]:
            raise UserError(_no_scalar_head(key))
        if missing:
            raise UserError(
                f"{key}: its files lack {some_of(missing, 3)}, which would be random; copy or save the model again"
            )


def check_regular(where: str, file: Path) -> None:
    """Raise UserError for a pipe or a device, the reading of which may never end. ``where``: for the message."""
    if file.exists() and not file.is_file() and not file.is_dir():
        raise UserError(f"{where}: {file.name} is a pipe or a device, not a file; copy it again")


def _check_start(where: str, start: bytes, size: int) -> None:
    if start == _POINTER:
        raise UserError(f"{where} is a git-LFS pointer, not the weights; run git lfs pull in that directory")
    if size < 8:
        raise UserError(f"{where} {'is empty' if not size else f'is cut: {size} bytes'}; copy it again")


def _entries(where: str, text: bytes, num_bytes: int) -> dict[str, dict[str, Any]]:
    """Return the entries of a header by tensor, of which the file has ``num_bytes`` bytes."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    entries = None
    if isinstance(header, dict):
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if entries is None or not all(map(_is_entry, entries.values())):
        raise UserError(f"{where} has a broken header, so it is no safetensors file; copy it again")
    needed = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if needed != num_bytes:
        found = "is cut" if num_bytes < needed else "has bytes after its last tensor"
        raise UserError(f"{where} {found}: {num_bytes} bytes of weights, and its header names {needed}; copy it again")
    ends = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    for (_, stop, first), (start, _, second) in pairwise(ends):
        if start != stop:
            found = "overlap" if start < stop else "have bytes between them"
            raise UserError(f"{where}: the weights of {first} and {second} {found}; copy it again")
    return entries


def _is_entry(entry: Any) -> bool:
    """Whether a header's entry has a type, a shape and as many bytes as both need."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        return False
    bits = _BITS.get(entry["dtype"])
    return bits is None or math.prod(shape) * bits == 8 * (offsets[1] - offsets[0])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(size, int) and 0 <= size < 2**63 for size in value)


def _of_model(stored: Collection[str], expected: Collection[str]) -> Iterator[str]:
    """Yield the names of stored tensors that are in modules of the model and not ``expected``, heads aside.

    A base model is saved without the prefix of its heads' model.
    """
    known = {
        *expected,
        *(name.partition(".")[2] for name in expected),
        ParameterName.LANGUAGE_HEAD,
        ParameterName.SCALAR_HEAD,
        SCALAR_BIAS,
    }
    modules = {each.partition(".")[0] for name in expected for each in (name, name.partition(".")[2])}
    return (name for name in stored if name not in known and name.partition(".")[0] in modules)


def _layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor is of, the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)


def _no_scalar_head(key: str) -> str:
    """Return the sentence for a model without a scalar head where scores are needed."""
    section = key.partition(" ")[0].removesuffix(".path")
    return (
        f"{key}: has no scalar head ({ParameterName.SCALAR_HEAD}), so its scores would be random; give a reward model, "
        f"or {section}.new_head: true"
    )
