"""Failures of a source on stderr, once for each kind: a function that fails does so thousands of times."""

from __future__ import annotations

import sys
from threading import Lock

from flexrlhf.rewards.base import ScoreFailure


class WarnOnce:
    """Writer of one line for each kind of failure of a source. Several threads may use it.

    ``name``: the source as the YAML has it, such as ``reward.url``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: set[str] = set()
        self._lock = Lock()

    def __call__(self, failure: ScoreFailure | None) -> None:
        """Write one line to stderr, unless there was one of this kind."""
        if failure is None:
            return
        with self._lock:
            is_first = failure.kind not in self._kinds
            self._kinds.add(failure.kind)
        if is_first:
            print(f"flexrlhf: {self._name}: {failure.text}; further ones are only counted", file=sys.stderr)
