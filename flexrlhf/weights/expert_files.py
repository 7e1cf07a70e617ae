"""Names of experts' tensors in files: one tensor for each expert and matrix, of which transformers' modules have two
for a layer.

Files of published models, and those that transformers writes, are named so; engines of other libraries read these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexrlhf.config.model_families import ExpertLayout, ModelFamily
from flexrlhf.weights.parameters import ParameterName


@dataclass(frozen=True)
class FilePiece:
    """Tensor in a file that is a part of a parameter.

    name:   in the file.
    shape:  in the file.
    box:    part of the parameter; its ranges of more than one element, and all that ``shape`` has, are the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    box: tuple[range, ...]


def file_pieces(family: str, name: str, shape: tuple[int, ...]) -> Iterator[FilePiece]:
    """Yield the tensors that a parameter is in files, which together are all of it."""
    layout = ModelFamily.of(family).experts or ExpertLayout("")
    stored = name.replace(".mlp.", f".{layout.block}.")
    gate, up, down = layout.matrices
    if not layout.in_files or not name.endswith((ParameterName.EXPERTS_IN, ParameterName.EXPERTS_OUT)):
        yield FilePiece(stored, shape, tuple(map(range, shape)))
        return
    rows_of_all = shape[1]
    halves = (gate, range(rows_of_all // 2)), (up, range(rows_of_all // 2, rows_of_all))
    parts: Sequence[tuple[str, range]] = (
        halves if name.endswith(ParameterName.EXPERTS_IN) else ((down, range(rows_of_all)),)
    )
    prefix = stored.rpartition(".")[0]
    for expert in range(shape[0]):
        for matrix, rows in parts:
            box = (range(expert, expert + 1), rows, range(shape[2]))
            yield FilePiece(f"{prefix}.{expert}.{matrix}.weight", (len(rows), shape[2]), box)


def file_shapes(family: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in files of a model with the parameters ``shapes``, by name."""
    return {piece.name: piece.shape for name, shape in shapes.items() for piece in file_pieces(family, name, shape)}
