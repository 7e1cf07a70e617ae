"""Lifetime of a rank: no longer than its launcher's, however that ends. Loads no torch, so that it runs first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flexrlhf.rewards.processes import is_killed_with_parent

LAUNCHER = "FLEXRLHF_LAUNCHER"
"""Variable with the process of the launcher of this machine, for its ranks."""


def end_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies. The ranks of other launchers are theirs to end."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    is_killed_with_parent()
    # it may have died before
    if os.getppid() != int(launcher):
        os._exit(1)


def has_launcher() -> bool:
    """Return whether ``flexrlhf`` started this rank, and not torchrun or the like."""
    return LAUNCHER in os.environ


def quiet_torch() -> None:
    """Have torch's C++ log errors alone, in this process and its ranks: its warnings of closed connections are pages.

    Before torch is loaded; a level that the user has set stays.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def rank_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the ranks started inside, then restore them."""
    added = {LAUNCHER: str(os.getpid()), **variables}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
