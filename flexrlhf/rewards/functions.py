"""A Python function of the user as a source of scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flexrlhf.config.reward_sources import FunctionSource
from flexrlhf.rewards.base import Sample, Score, make_batches
from flexrlhf.rewards.limits import Deadline
from flexrlhf.rewards.warn_once import WarnOnce
from flexrlhf.rewards.worker_calls import call, load
from flexrlhf.rewards.workers import Workers


class UserFunction:
    """A function that worker processes call; see ``signatures`` for its two forms, ``workers`` for faults.

    Columns are the data rows' own, as lists; ``num_tokens``, the responses' tokens; with a separator ``steps``. One
    that the function has no parameter for is left out, unless it takes ``**columns``.
    """

    def __init__(self, source: FunctionSource, warn: WarnOnce) -> None:
        self._source, self._warn = source, warn
        self._workers = Workers(source.workers, source.timeout_seconds, partial(load, source.function))

    def score(self, samples: Sequence[Sample], deadline: Deadline) -> list[Score]:
        """Return one score a sample; bounded in time as ``Workers.replies``."""
        function = partial(call, self._source.function, self._source.level)
        replies = self._workers.replies(
            function, make_batches(samples, self._source.batch_size, self._source.separator), deadline
        )
        for reply in replies:
            self._warn(reply.failure)
        return [score for reply in replies for score in reply.scores]

    def close(self) -> None:
        self._workers.close()
