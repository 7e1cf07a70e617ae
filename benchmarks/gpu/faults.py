"""A training loop of a user in which rank 1 fails as a variable says: ``algorithm.loop`` of ``grpo-faulty``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flexrlhf.trainer.trainer import Trainer

VARIABLE = "FLEXRLHF_PLANTED"
"""Variable with the fault and a file, as ``SIGKILL=/path/of/file``; without it nothing happens."""
RANK, STEP = "1", 1
PLANTED = "planted by make gpu"
HUGE = 2**45


def raise_error() -> None:
    """Raise the error of a user's function."""
    raise RuntimeError(PLANTED)


def exhaust_memory() -> None:
    """Allocate more than any device has."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.empty(HUGE, dtype=torch.uint8, device=device)


FAULTS: dict[str, Callable[[], None]] = {
    "exception": raise_error,
    "out of memory": exhaust_memory,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    # to the launcher: the run saves a checkpoint and ends
    "SIGTERM": lambda: os.kill(os.getppid(), signal.SIGTERM),
}


def train_all(trainer: Trainer) -> None:
    """Train; before the update of ``STEP`` rank 1 writes the time to the file that ``VARIABLE`` names, and fails."""
    name, _, mark = os.environ.get(VARIABLE, "").partition("=")
    for batch in trainer.batches():
        experiences = trainer.generate_experience(batch)
        if name and batch.turn == STEP and os.environ["RANK"] == RANK:
            Path(mark).write_text(repr(time.time()))
            FAULTS[name]()
        trainer.train_rlhf(experiences)
