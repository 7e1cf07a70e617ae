"""Distribution of tests over processes: tests of a file, and all that read common launches, share a process."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

LAUNCHES = "launches: Launches"
"""Parameter of tests that read the outcomes of common launches."""
WAITING = (
    *("test_rewards", "test_reward_service", "test_ray", "test_failures", "test_signals", "test_nodes", "test_doctor"),
    *("test_rank_factory", "test_accelerator", "test_resume"),
)
"""Files that wait most of their time, and the longest of those that start ranks, next to the common launches."""
FOLDERS = ("distributed", "engines", "emulate", "properties", "unit")
"""From the one whose files take longest, so that no process is left alone with one of them at the end."""


class FileScheduling(LoadScopeScheduling):
    """Distribution of test files to processes; files that share launches are one unit."""

    def _split_scope(self, nodeid: str) -> str:
        file = self.config.rootpath / nodeid.partition("::")[0]
        return LAUNCHES if reads_launches(file) else str(file)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have no garbage collected while libraries and tests are loaded, nor ever search their objects for it, which are
    millions."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # few objects of plans are in cycles: by default a twentieth of the time is spent on searches for them
        gc.set_threshold(50_000)
        # extensions report objects that are frozen at the exit as leaks
        atexit.register(gc.unfreeze)


@cache
def reads_launches(file: Path) -> bool:
    return LAUNCHES in file.read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests in the order in which files are distributed: the common launches first."""
    items.sort(key=lambda item: (_turn(item.path), FOLDERS.index(item.path.parent.name)))


def _turn(file: Path) -> int:
    return 0 if reads_launches(file) else 1 if file.stem in WAITING else 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    return FileScheduling(config, log)
