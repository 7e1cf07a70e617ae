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


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that the umask gives; safetensors itself lets nobody else read it.

    metadata:  texts of its header; None: those that transformers looks for.

    Raises OSError with the name of the file.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"} if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise _os_error(error, file) from error
    file.chmod(mode)


def _os_error(error: SafetensorError, file: Path) -> OSError:
    """Return the error of the operating system that safetensors has only as text."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(file)) if number else OSError(str(error))
