"""An environment that takes a given time for each reply, for ``environment_latency.py``."""

from __future__ import annotations

import asyncio
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


class SlowService(Slow):
    """The same behind a service: a process waits for the replies of all its episodes at once."""

    async def step(self, reply: str) -> Turn:  # type: ignore[override]  # either form is an environment's
        await asyncio.sleep(self._seconds)
        return Turn(" and", reward=float(len(reply)))
