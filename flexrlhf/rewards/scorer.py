"""The scores of one section (reward or cost) that come from no model: the weighted sum over its sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from flexrlhf.config.reward_sources import FunctionSource, RuleSource, ServiceSource
from flexrlhf.rewards.base import Answer, Entry, Scores
from flexrlhf.rewards.functions import Function
from flexrlhf.rewards.limits import Asked, Deadline
from flexrlhf.rewards.rules import make_rule
from flexrlhf.rewards.services import Service
from flexrlhf.rewards.warn_once import Told

Called = FunctionSource | ServiceSource | RuleSource


class Scorer:
    """All sources of one section that are no models. ``name``: the section, for messages.

    ``deadline_seconds``: of one ``score``, all sources together; what is not scored by then has no score.
    Nothing starts before the first ``score``. The sources are asked at the same time.
    """

    def __init__(self, sources: Sequence[Called], name: str, deadline_seconds: float) -> None:
        self._sources = tuple(sources)
        self._asked = [_asked(source, name) for source in sources]
        self._deadline_seconds = deadline_seconds
        self._per_token = any(source.level == "token" for source in sources)

    def score(self, answers: Sequence[Answer]) -> Scores:
        """Scores of ``answers``, which may be none. Takes ``deadline_seconds`` at most, and a few to end what hangs."""
        if not answers or not self._asked:
            return Scores([0.0] * len(answers), None if not self._per_token else [], 0)
        deadline = Deadline.after(self._deadline_seconds)
        with ThreadPoolExecutor(len(self._asked)) as threads:
            columns = list(threads.map(lambda asked: asked.ask(answers, deadline), self._asked))
        rows = list(zip(*columns, strict=True))
        return Scores(
            totals=[self._total(row) for row in rows],
            tokens=[self._tokens(row, answer.num_tokens) for row, answer in zip(rows, answers, strict=True)]
            if self._per_token
            else None,
            failed=sum(None in row for row in rows),
        )

    def close(self) -> None:
        """End what the sources run, within a few seconds."""
        for asked in self._asked:
            asked.close()

    def _total(self, row: Sequence[Entry]) -> float:
        if None in row:
            return math.nan
        return sum(
            source.weight * (sum(entry) if isinstance(entry, list) else entry)
            for source, entry in zip(self._sources, row, strict=True)
            if entry is not None
        )

    def _tokens(self, row: Sequence[Entry], num_tokens: int) -> list[float]:
        """The score of a whole answer lands on its last token."""
        if None in row:
            return [math.nan] * num_tokens
        tokens = [0.0] * num_tokens
        for source, entry in zip(self._sources, row, strict=True):
            if isinstance(entry, list):
                tokens = [token + source.weight * value for token, value in zip(tokens, entry, strict=True)]
            elif entry is not None and tokens:
                tokens[-1] += source.weight * entry
        return tokens


def _asked(source: Called, name: str) -> Asked:
    match source:
        case FunctionSource():
            return Function(source, Told(f"{name}.function {source.function}"))
        case ServiceSource():
            return Service(source, Told(f"{name}.url"))
        case RuleSource():
            return make_rule(source, Told(f"{name}.rule {source.rule}"))
