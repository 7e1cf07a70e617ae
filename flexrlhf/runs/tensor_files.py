"""Writing of safetensors files that others may read as any new file."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""Number of the system's error in the text of one of safetensors."""


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors itself lets nobody else read it.

    metadata:  texts of its header; None: those that transformers looks for.

    Raises OSError where the file system fails.
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
