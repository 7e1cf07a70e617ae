"""Device of the ranks of a machine, by the devices that torch finds there."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

from flexrlhf.config.placement_settings import ClusterSpec
from flexrlhf.errors import UserError

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver by the major version of CUDA (its release notes, table of minor version compatibility)."""


def why_no_gpu(driver: Path = ClusterSpec.NVIDIA_DRIVER, cuda: str | None = torch.version.cuda) -> str:
    """Return why torch, built for ``cuda``, finds no GPU next to NVIDIA's driver; empty if none is loaded."""
    found = re.search(r"Kernel Module.*?(\d+)\.[\d.]+", driver.read_text()) if driver.is_file() else None
    if found is None:
        return ""
    if cuda is None:
        return "NVIDIA's driver is loaded, but torch is built for CPUs; install it from an index of a CUDA build"
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if int(found[1]) < oldest:
        return (
            f"torch is built for CUDA {cuda}, which needs NVIDIA's driver {oldest}, found {found[1]}; update it, or "
            f"install torch from the index of an older CUDA"
        )
    return "NVIDIA's driver is loaded, but no GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES"


def _no_driver() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "NVIDIA's driver is not loaded" if hidden is None else f"CUDA_VISIBLE_DEVICES is {hidden!r}"


def choose_device(setting: str, num_local: int, planned: str = "") -> str:
    """Return ``cpu`` or ``cuda`` for all ranks, given ``cluster.device`` and the number of ranks on this node.

    ``auto`` is CUDA when every rank of this node has a device of its own; with ``cuda`` several ranks may share one,
    over gloo. ``planned``: the GPU that the plan has on this node (``planned_gpu``); empty if its classes are labels.
    Raises UserError for ``cuda`` without any device, and for ``auto`` with a planned GPU and too few devices.
    """
    count = torch.cuda.device_count()
    reason = "" if count else why_no_gpu()
    if setting == "auto" and planned and count < num_local:
        found = f"{count} for {num_local} ranks" if count else f"none ({reason or _no_driver()})"
        sharing = ", or cuda for ranks that share a GPU" if count else ""
        raise UserError(f"{planned}, and this machine has {found}; write {ClusterSpec.ON_CPUS}{sharing}")
    if setting == "cuda" and count == 0:
        found = reason or "found 0; use cpu"
        raise UserError(f"cluster.device: cuda needs a CUDA device on this node, {found}")
    if setting == "auto" and reason:
        print(f"flexrlhf: running on CPU: {reason}", file=sys.stderr)
    if setting == "cuda" and count < num_local:
        print(f"flexrlhf: {num_local} ranks on {count} CUDA devices of this node: over gloo", file=sys.stderr)
    if setting == "auto" and 0 < count < num_local:
        print(f"flexrlhf: {num_local} ranks but {count} CUDA devices on this node: running on CPU", file=sys.stderr)
    return setting if setting != "auto" else "cuda" if count >= num_local else "cpu"
