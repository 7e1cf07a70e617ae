"""Choice of a launcher, by ``--launcher`` or by the environment."""

from __future__ import annotations

from importlib import import_module

from flexrlhf.launch.launchers.job_start import Launcher


def launcher(name: str) -> Launcher:
    """Return the launcher that the file of this name starts."""
    start: Launcher = import_module(f"flexrlhf.launch.launchers.{name}").start
    return start
