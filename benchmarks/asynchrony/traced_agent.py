"""An environment whose episodes follow the trace of ``row_lives.py``, scaled, for ``agent_speed.py``.

Its texts are numbers. The last one of a reply is how many tokens the next turn has: ``countdown_model.py`` counts down.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random
from typing import Any

from benchmarks.asynchrony.row_lives import PROMPT, make_episode
from flexrlhf.environments.base import Turn

MOST_TOKENS = 100
"""Largest number."""


def word(number: int) -> str:
    return f" n{number:03}"


class TracedAgent:
    """An episode of the trace. Its time and its tokens are divided by scales."""

    def __init__(self, seconds_scale: float, tokens_scale: float, cap: float) -> None:
        """``cap``: deadline of a reply in seconds of the trace."""
        self._seconds_scale, self._tokens_scale, self._cap = seconds_scale, tokens_scale, cap

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._turns = list(make_episode(Random(seed), self._cap))
        # behind the first token of a text and the prompt's only word
        return self._text(PROMPT, less=2)

    def step(self, reply: str) -> Turn:
        turn = self._turns.pop(0)
        time.sleep(turn.seconds / self._seconds_scale)
        if not self._turns:
            return Turn("", float(len(reply) % 2), is_done=True)
        return Turn(self._text(turn.appended))

    def _text(self, tokens: int, less: int = 0) -> str:
        """Return so many tokens of the trace as a text that the next turn follows."""
        length, next_turn = (max(1, round(each / self._tokens_scale)) for each in (tokens, self._turns[0].sampled))
        return word(1) * (length - less - 1) + word(min(MOST_TOKENS, next_turn))
