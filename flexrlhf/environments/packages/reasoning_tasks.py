"""Tasks of reasoning-gym as environments of one turn, or of several attempts."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from flexrlhf.api import Turn, task_scorer


class ReasoningTask:
    """One question of ``reasoning-gym:TASK``: the row's, where rows come from ``data.path: reasoning-gym:TASK``.

    A turn's reward is by how much its score exceeds the best one before, so that the episode's is the best score.

    name:      of the task
    attempts:  turns; after each but the last, a message gives a score that is not full
    options:   settings of the task, for a question that is generated from the episode's seed
    """

    library, extra = "reasoning_gym", "reasoning"

    def __init__(self, name: str, attempts: int = 1, **options: Any) -> None:
        self._name, self._attempts, self._options = name, attempts, options
        self._best = 0.0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Read the row's question, which its prompt has, or generate one."""
        if row.get("entry") is not None:
            self._score = task_scorer(row["task"], row["settings"])
            self._entry = ast.literal_eval(row["entry"])
            return ""
        from reasoning_gym.factory import create_dataset

        tasks = create_dataset(self._name, seed=seed % 2**31, size=1, **self._options)
        self._score, self._entry = tasks.score_answer, tasks[0]
        return str(self._entry["question"])

    def step(self, reply: str) -> Turn:
        """Score the text between <answer> and </answer>."""
        from reasoning_gym.utils import extract_answer

        self._attempts -= 1
        score = float(self._score(extract_answer(reply), self._entry))
        reward, self._best = max(0.0, score - self._best), max(score, self._best)
        is_done = score >= 1 or not self._attempts
        return Turn("" if is_done else f"The score of that is {score:g} of 1. Try again.", reward, is_done)
