"""Rollout processes that are killed while their run goes on, as the kernel does when memory is full."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from commands import name_of
from processes import descendants

STEP = 3
"""Step in whose generation a process is killed."""


@contextmanager
def killed_decoders(directories: Sequence[Path]) -> Iterator[None]:
    """Kill the vLLM process of each of the runs in ``directories`` once, when it begins to generate ``STEP``."""
    ended, due = threading.Event(), list(directories)

    def watch() -> None:
        while due and not ended.wait(0.05):
            for directory in [each for each in due if _generates(each)]:
                due.remove(directory)
                for pid in decoders_of(os.getpid()):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def decoders_of(pid: int) -> list[int]:
    """Process ids of the vLLM processes that a process or its children have started."""
    return [each for each in descendants(pid) if "EngineCore" in name_of(each)]


def _generates(directory: Path) -> bool:
    """Whether a run has begun to generate ``STEP``, by the logs that its ranks write."""
    for log in directory.glob("flight/rank-*.jsonl"):
        for line in (line for line in log.read_text().splitlines() if "generate on " in line):
            # the last line may be half written
            with suppress(json.JSONDecodeError):
                span = json.loads(line).get("begin", {})
                if span.get("label", "").startswith("generate on ") and span["step"] >= STEP:
                    return True
    return False
