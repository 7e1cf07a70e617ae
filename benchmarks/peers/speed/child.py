"""Runs of either side as child processes, whose output matters if they fail."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SHOWN_CHARACTERS = 4000


def run_quietly(command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """Run ``command`` with one thread a process, its output in ``log``; end with the last lines if it fails."""
    with log.open("w") as file:
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        )
    if done.returncode:
        raise SystemExit(f"{log.read_text()[-SHOWN_CHARACTERS:]}\n{' '.join(command)}: exit status {done.returncode}")
