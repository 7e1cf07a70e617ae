"""Weights in memory that two processes map, described by offsets and shapes instead of pickled tensors.

On a CPU it is one anonymous file: it needs no space in /dev/shm, and is freed with the last process that maps it. On a
GPU the tensors stay where they are, and their memory is opened by CUDA IPC handles.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

_ALIGNMENT = 64

SharedViews = dict[str, Any]
"""``dtype``; ``buffers``: (path or handle, bytes) of each; ``views``: name → (buffer, offset, shape, strides)."""


def move_to_shared(parameters: Sequence[Tensor]) -> str:
    """Move ``parameters`` (CPU, of one dtype) into one anonymous file. Returns the path by which others open it."""
    sizes = [-(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    descriptor = os.memfd_create("flexrlhf-weights")
    os.ftruncate(descriptor, sum(sizes))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    pieces = _open_file(path, sum(sizes), parameters[0].dtype).split([s // parameters[0].itemsize for s in sizes])
    for parameter, piece in zip(parameters, pieces, strict=True):
        target = piece[: parameter.numel()].view(parameter.shape)
        parameter.data = target.copy_(parameter.data)
    return path


def describe(views: Mapping[str, Tensor], path: str | None) -> SharedViews:
    """Describe ``views`` of shared tensors for ``open_views`` in another process.

    ``path``: the file that contains them; None: they are on a GPU.
    """
    first = next(iter(views.values()))
    buffers = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}
    numbers = {address: number for number, address in enumerate(buffers)}
    if path is not None:
        assert len(buffers) == 1, "all weights are in one file"
        sources: list[Any] = [path]
    else:
        sources = [_handle(storage, first.dtype) for storage in buffers.values()]
    return {
        "dtype": str(first.dtype).removeprefix("torch."),
        "buffers": [(source, storage.nbytes()) for source, storage in zip(sources, buffers.values(), strict=True)],
        "views": {
            name: (numbers[v.untyped_storage().data_ptr()], v.storage_offset(), tuple(v.shape), v.stride())
            for name, v in views.items()
        },
    }


def open_views(shared: SharedViews) -> dict[str, Tensor]:
    """Return the views that another process has described: tensors in its memory."""
    dtype = getattr(torch, shared["dtype"])
    buffers = [_open(source, size, dtype) for source, size in shared["buffers"]]
    return {
        name: buffers[number].as_strided(tuple(shape), tuple(strides), offset)
        for name, (number, offset, shape, strides) in shared["views"].items()
    }


def _open(source: Any, size: int, dtype: torch.dtype) -> Tensor:
    """Map a buffer from its path or its CUDA handle."""
    if isinstance(source, str):
        return _open_file(source, size, dtype)
    rebuild, arguments = pickle.loads(source)
    tensor: Tensor = rebuild(*arguments)
    return tensor


def _open_file(path: str, size: int, dtype: torch.dtype) -> Tensor:
    """Map ``size`` bytes of a file as a tensor with one dimension."""
    storage = torch.UntypedStorage.from_file(path, True, size)
    return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[arg-type]


def _handle(storage: torch.UntypedStorage, dtype: torch.dtype) -> bytes:
    """Return a pickled CUDA IPC handle."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # type: ignore[arg-type]
    return pickle.dumps(reduce_tensor(tensor))
