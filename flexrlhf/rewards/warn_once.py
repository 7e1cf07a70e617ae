"""Problems of a source, told once for each kind: a function that fails does so thousands of times."""

from __future__ import annotations

import sys
from threading import Lock

from flexrlhf.rewards.base import Problem


class Told:
    """``name``: the source as a user finds it in the YAML. Several threads may tell."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: set[str] = set()
        self._lock = Lock()

    def __call__(self, problem: Problem | None) -> None:
        """Write one line to stderr, unless there was one of this kind."""
        if problem is None:
            return
        with self._lock:
            is_first = problem.kind not in self._kinds
            self._kinds.add(problem.kind)
        if is_first:
            print(f"flexrlhf: {self._name}: {problem.text}; further ones are counted only", file=sys.stderr)
