"""A Python function of the user as a source of scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flexrlhf.config.reward_sources import FunctionSource
from flexrlhf.rewards.base import Answer, Entry, batches_of
from flexrlhf.rewards.limits import Deadline
from flexrlhf.rewards.warn_once import Told
from flexrlhf.rewards.worker_calls import call, load
from flexrlhf.rewards.workers import Workers


class Function:
    """Called in worker processes as ``function(prompts, responses, **columns)``; see ``workers`` for what may go wrong.

    Columns are the rows' own, as lists, and ``num_tokens``, the responses' tokens; those that it has no name for are
    left out, unless it takes ``**columns``.
    """

    def __init__(self, source: FunctionSource, told: Told) -> None:
        self._source, self._told = source, told
        self._workers = Workers(source.workers, source.timeout_seconds, partial(load, source.function))

    def ask(self, answers: Sequence[Answer], deadline: Deadline) -> list[Entry]:
        """Bounded as ``Workers.replies``."""
        asked = partial(call, self._source.function, self._source.level)
        replies = self._workers.replies(asked, batches_of(answers, self._source.batch_size), deadline)
        for reply in replies:
            self._told(reply.problem)
        return [entry for reply in replies for entry in reply.entries]

    def close(self) -> None:
        self._workers.close()
