"""Count a host's reads of tensors, at which it waits for a GPU."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

OPERATIONS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "repeat_interleave", "bincount")
UNIQUE = ("_unique2", "unique_dim", "unique_consecutive")
INDEXING = ("index", "index_put", "index_put_")
"""Read if an index is a mask."""


class _Operations(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        is_mask = name in INDEXING and any(each is not None and each.dtype == torch.bool for each in args[1])
        kwargs = kwargs or {}
        if (name in (*OPERATIONS, *UNIQUE) or is_mask) and kwargs.get("output_size") is None:
            self._note(name)
        return func(*args, **kwargs)


def host_reads(work: Callable[[], object]) -> Counter[str]:
    """Reads by ``work``, by line."""
    found: Counter[str] = Counter()

    def note(name: str) -> None:
        outside = [each for each in traceback.extract_stack() if "/torch/" not in each.filename]
        last = next(each for each in reversed(outside) if each.filename != __file__)
        found[f"{last.filename.rpartition('/')[2]}: {last.line}"] += 1

    def noted(name: str) -> Callable[..., Any]:
        plain = getattr(Tensor, name)

        def convert(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            note(name)
            return plain(tensor, *args, **kwargs)

        return convert

    with MonkeyPatch.context() as patch, _Operations(note):
        # a mode of functions would miss layers that a backward pass computes again
        for name in ("tolist", "numpy"):
            patch.setattr(Tensor, name, noted(name))
        work()
    return found
