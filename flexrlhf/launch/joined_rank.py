"""Rank of a command that trains nothing, such as a profile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexrlhf.comm.world import World, open_world
from flexrlhf.launch.failures import ErrorReport
from flexrlhf.launch.lifetime import end_with_launcher
from flexrlhf.launch.rank_watch import RankWatch


def limit_threads() -> None:
    """Give this rank as many threads as it has cores of its machine, unless ``OMP_NUM_THREADS`` says how many."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@contextmanager
def joined_rank(device: str, timeout_seconds: float) -> Iterator[World]:
    """Be a rank that ``run_on_ranks`` has started: yield the job's world, and report an error of the body.

    ``timeout_seconds``: longest wait for another rank.
    """
    end_with_launcher()
    # as in launch/worker.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with ErrorReport(), open_world(device, timeout_seconds) as world, RankWatch(world, timeout_seconds):
        yield world
