"""This package without the parts that not every run needs: their modules are not found, as in a checkout that lacks the
folders."""

from __future__ import annotations

from pathlib import Path

from benchmarks.source_figures import SATELLITES

HOOK = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any((name + ".").startswith("flexrlhf." + each) for each in {parts!r}):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Absent())
"""


def write_hook(directory: Path) -> Path:
    """Write a module into ``directory`` that Python loads as it starts, if the directory is in PYTHONPATH."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(HOOK.format(parts=SATELLITES))
    return directory
