"""Weights in memory that two processes map: told as offsets and shapes, so that neither needs the other's objects.

On a CPU it is one anonymous file: it needs no space in /dev/shm, and is gone with the last process that maps it. On a
GPU the tensors stay where they are, and their memory is opened by handles of CUDA.
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

Shared = dict[str, Any]
"""``buffers``: of each how it is opened; ``views``: name → number of its buffer, offset in numbers, shape, strides."""


def move_to_shared(parameters: Sequence[torch.nn.Parameter]) -> str:
    """Move ``parameters`` (CPU, all of one type) into one anonymous file. Returns the path by which others open it."""
    sizes = [-(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    descriptor = os.memfd_create("flexrlhf-weights")
    os.ftruncate(descriptor, sum(sizes))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    pieces = _opened_file(path, sum(sizes), parameters[0].dtype).split([s // parameters[0].itemsize for s in sizes])
    for parameter, piece in zip(parameters, pieces, strict=True):
        place = piece[: parameter.numel()].view(parameter.shape)
        parameter.data = place.copy_(parameter.data)
    return path


def describe(views: Mapping[str, Tensor], path: str | None) -> Shared:
    """Tell of ``views`` into shared tensors where they are. ``path``: of the file that holds them, None on GPUs."""
    first = next(iter(views.values()))
    buffers = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views.values()}
    numbers = {address: number for number, address in enumerate(buffers)}
    if path is not None:
        assert len(buffers) == 1, "all weights are in one file"
        opened: list[Any] = [path]
    else:
        opened = [_handle(storage, first.dtype) for storage in buffers.values()]
    return {
        "dtype": str(first.dtype).removeprefix("torch."),
        "buffers": [(how, storage.nbytes()) for how, storage in zip(opened, buffers.values(), strict=True)],
        "views": {
            name: (numbers[v.untyped_storage().data_ptr()], v.storage_offset(), tuple(v.shape), v.stride())
            for name, v in views.items()
        },
    }


def open_views(shared: Shared) -> dict[str, Tensor]:
    """The views that another process told of."""
    dtype = getattr(torch, shared["dtype"])
    buffers = [_opened(how, size, dtype) for how, size in shared["buffers"]]
    return {
        name: buffers[number].as_strided(tuple(shape), tuple(strides), offset)
        for name, (number, offset, shape, strides) in shared["views"].items()
    }


def _opened(how: Any, size: int, dtype: torch.dtype) -> Tensor:
    if isinstance(how, str):
        return _opened_file(how, size, dtype)
    rebuild, arguments = pickle.loads(how)
    tensor: Tensor = rebuild(*arguments)
    return tensor


def _opened_file(path: str, size: int, dtype: torch.dtype) -> Tensor:
    storage = torch.UntypedStorage.from_file(path, True, size)
    return torch.empty(0, dtype=dtype).set_(storage)  # type: ignore[arg-type]


def _handle(storage: torch.UntypedStorage, dtype: torch.dtype) -> bytes:
    whole = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # type: ignore[arg-type]
    return pickle.dumps(reduce_tensor(whole))
