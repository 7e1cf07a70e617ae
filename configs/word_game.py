"""The environment of word-game.yaml: each turn has to contain the word that the environment said last."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from flexrlhf.environments.base import Turn

WORDS = ("library", "concert", "fish", "breakfast", "candle", "game", "rice", "door")
TURNS = 3


class WordGame:
    """One game of ``TURNS`` turns, whose rewards sum to 1."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Say the first word, behind the prompt."""
        self._random = random.Random(seed)
        return self._say()

    def step(self, reply: str) -> Turn:
        """Reward a turn that contains the word, and say the next one."""
        reward = float(self._word in reply.split()) / TURNS
        return Turn(self._say(), reward)

    def _say(self) -> str:
        self._word = self._random.choice(WORDS)
        return f" {self._word}"
