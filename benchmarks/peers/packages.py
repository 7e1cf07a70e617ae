"""Import of other engines' modules from a separate folder, without their dependencies for GPUs."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ABSENT = ("flash_attn", "vllm", "swanlab", "trackio")
"""Packages of GPU kernels, servers and loggers, which engines import and the compared functions never call."""


OF_THE_FOLDER = ("antlr4",)
"""Packages that are imported from the folder even if this environment has them, in another version than Hydra needs."""


class _Absent(ModuleType):
    """Module whose functions raise."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} is not installed")

        return function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of such modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def use_packages(directory: Path) -> None:
    """Let imports find the packages in ``directory``, after this environment's. Nothing is compiled."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, str(directory))
    for name in OF_THE_FOLDER:
        if (directory / name).is_dir():
            importlib.import_module(name)
    sys.path.remove(str(directory))
    sys.path.append(str(directory))
    sys.meta_path.append(_Finder())
