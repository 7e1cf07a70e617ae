"""An environment of two turns, which needs no package: the policy reads how many words its first turn had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexrlhf.environments.base import Turn


class Counting:
    """An episode whose reward is the number of different words in its second turn."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Add nothing to the prompt."""
        self._turns = 0
        return ""

    def step(self, reply: str) -> Turn:
        """Return as many words as the reply has, at most three; after the second turn end the episode."""
        self._turns += 1
        words = reply.split()
        return Turn(" bam" * min(3, len(words)), float(len(set(words))), self._turns == 2)
