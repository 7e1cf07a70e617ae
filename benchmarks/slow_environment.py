"""An environment that takes a given time for each reply, for ``environment_latency.py``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from flexrlhf.environments.base import Turn


class Slow:
    """Episodes that never end, whose replies take ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return ""

    def step(self, reply: str) -> Turn:
        time.sleep(self._seconds)
        return Turn(" and", reward=float(len(reply)))
