"""Saved weights: type, files and buckets of a model, and pieces of tensors in checkpoints, their writers and readers.

A checkpoint contains every element of a tensor at least once, in pieces that follow from the layout of the run that
wrote it; a run of any other layout assembles its own parts from them. Checkpoints are in float32, whatever the type of
the saved model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from flexrlhf.weights.expert_files import file_pieces
from flexrlhf.weights.parameters import ParameterName
from flexrlhf.weights.shards import make_buckets
from flexrlhf.weights.stored_model import StoredModel


@dataclass(frozen=True)
class SavedBucket:
    """Weights that are gathered and written together.

    names:    of parameters.
    experts:  range of the experts of the only one; None: whole parameters.
    size:     bytes.
    """

    names: tuple[str, ...]
    experts: range | None
    size: int


@dataclass(frozen=True)
class SavedFile:
    """A file of a saved model, which one rank writes.

    name:     of the file.
    buckets:  weights that are gathered for it, in the order of its tensors.
    """

    name: str
    buckets: tuple[SavedBucket, ...]

    @classmethod
    def all_of(
        cls, family: str, shapes: Mapping[str, tuple[int, ...]], item_bytes: int, bucket_bytes: int, shard_bytes: float
    ) -> list[SavedFile]:
        """Return the files of a model with the parameters ``shapes``, of at most ``shard_bytes``.

        A parameter with tensors in several files is in buckets of each.
        """
        parameters, sizes = dict[str, tuple[str, range]](), dict[str, int]()
        for name in sorted(shapes):
            for piece in file_pieces(family, name, shapes[name]):
                parameters[piece.name] = name, piece.box[0] if piece.box else range(1)
                sizes[piece.name] = (4 if ParameterName(name).is_router_bias else item_bytes) * math.prod(piece.shape)
        files = []
        for file, tensors in cls.split(sizes, shard_bytes).items():
            rows: dict[str, range] = {}
            for name, found in map(parameters.__getitem__, tensors):
                rows[name] = range(rows.get(name, found).start, found.stop)
            files.append(cls(file, tuple(_saved_buckets(shapes, rows, item_bytes, bucket_bytes))))
        return files

    @staticmethod
    def split(sizes: Mapping[str, int], shard_bytes: float) -> dict[str, list[str]]:
        """Return the names of the tensors of each file, both in the order of ``sizes``, bytes by name."""
        shards: list[list[str]] = [[]]
        size = 0
        for name in sizes:
            if shards[-1] and size + sizes[name] > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += sizes[name]
        if len(shards) == 1:
            return {StoredModel.SINGLE: shards[0]}
        return {f"model-{index:05d}-of-{len(shards):05d}.safetensors": names for index, names in enumerate(shards, 1)}


def _saved_buckets(
    shapes: Mapping[str, tuple[int, ...]], rows: Mapping[str, range], item_bytes: int, bucket_bytes: int
) -> Iterator[SavedBucket]:
    """Yield the buckets of the parameters of ``rows``, in the order of their names: whole ones in at most
    ``bucket_bytes``, or one that is larger; experts that are larger a few at a time, since a layer's may be most of a
    device's memory. ``rows``: of those the experts that a file has."""
    sizes = {name: item_bytes * math.prod(shapes[name]) for name in rows}
    for is_split, group in groupby(
        sizes, lambda name: ParameterName(name).is_of_experts and sizes[name] > bucket_bytes
    ):
        names = list(group)
        if not is_split:
            for bucket in make_buckets([sizes[name] for name in names], bucket_bytes):
                inside = tuple(names[index] for index in bucket)
                yield SavedBucket(inside, None, sum(sizes[name] for name in inside))
            continue
        for name in names:
            number = shapes[name][0]
            step = max(1, bucket_bytes * number // sizes[name])
            for start in rows[name][::step]:
                experts = range(start, min(start + step, rows[name].stop))
                yield SavedBucket((name,), experts, sizes[name] // number * len(experts))
