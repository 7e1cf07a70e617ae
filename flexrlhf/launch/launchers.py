"""Launchers by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from flexrlhf.launch.job import Launcher
from flexrlhf.placement.hosts import Hosts

LAUNCHERS = {
    "local": "flexrlhf.launch.local:LocalLauncher",
    "torchrun": "flexrlhf.launch.torchrun:TorchrunLauncher",
    "ray": "flexrlhf.launch.ray_driver:RayLauncher",
}


def find_launcher(name: str) -> Launcher:
    """Return the launcher of a name; ``auto`` and SLURM's tasks start the ranks of their node, or are one of them."""
    known = name if name in LAUNCHERS else "torchrun" if Hosts.under_torchrun() else "local"
    launcher: type[Launcher] = EntryPoint(known, LAUNCHERS[known], "flexrlhf.launchers").load()
    return launcher()
