"""Writing of safetensors files that others may read as any new file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors itself lets nobody else read it.

    metadata:  texts of its header; None: those that transformers looks for.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file, metadata={"format": "pt"} if metadata is None else dict(metadata))
    file.chmod(mode)
