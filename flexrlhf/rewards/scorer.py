"""The scores of one section (reward or cost) that come from no model: the weighted sum over its sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from flexrlhf.config.reward_sources import ExternalSource, FunctionSource, RuleSource, ServiceSource
from flexrlhf.rewards.base import Sample, Score, Scores
from flexrlhf.rewards.functions import UserFunction
from flexrlhf.rewards.limits import Deadline, ScoreSource
from flexrlhf.rewards.rules import make_rule
from flexrlhf.rewards.services import HttpService
from flexrlhf.rewards.warn_once import WarnOnce


class Scorer:
    """All sources of one section that are no models, called at the same time.

    Nothing starts before the first ``score``.

    sources:           the sources, as the YAML has them
    name:              the section, for messages
    deadline_seconds:  limit of one ``score``, all sources together; a sample that is late has no score
    """

    def __init__(self, sources: Sequence[ExternalSource], name: str, deadline_seconds: float) -> None:
        self._settings = tuple(sources)
        self._sources = [_make_source(source, name) for source in sources]
        self._deadline_seconds = deadline_seconds
        self._per_token = any(source.level == "token" for source in sources)

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Return the scores of ``samples``, which may be none.

        Takes ``deadline_seconds`` at most, and a few to end what hangs.
        """
        if not samples or not self._sources:
            return Scores([0.0] * len(samples), None if not self._per_token else [], 0)
        deadline = Deadline.after(self._deadline_seconds)
        with ThreadPoolExecutor(len(self._sources)) as threads:
            columns = list(threads.map(lambda source: source.score(samples, deadline), self._sources))
        rows = list(zip(*columns, strict=True))
        return Scores(
            totals=[self._total(row) for row in rows],
            tokens=[self._tokens(row, sample.num_tokens) for row, sample in zip(rows, samples, strict=True)]
            if self._per_token
            else None,
            failed=sum(None in row for row in rows),
        )

    def close(self) -> None:
        """End the processes of the sources, within a few seconds."""
        for source in self._sources:
            source.close()

    def _total(self, row: Sequence[Score]) -> float:
        if None in row:
            return math.nan
        return sum(
            source.weight * (sum(score) if isinstance(score, list) else score)
            for source, score in zip(self._settings, row, strict=True)
            if score is not None
        )

    def _tokens(self, row: Sequence[Score], num_tokens: int) -> list[float]:
        """Return one number a token; the score of a whole response is added to its last token."""
        if None in row:
            return [math.nan] * num_tokens
        tokens = [0.0] * num_tokens
        for source, score in zip(self._settings, row, strict=True):
            if isinstance(score, list):
                tokens = [token + source.weight * value for token, value in zip(tokens, score, strict=True)]
            elif score is not None and tokens:
                tokens[-1] += source.weight * score
        return tokens


def _make_source(source: ExternalSource, name: str) -> ScoreSource:
    match source:
        case FunctionSource():
            return UserFunction(source, WarnOnce(f"{name}.function {source.function}"))
        case ServiceSource():
            return HttpService(source, WarnOnce(f"{name}.url"))
        case RuleSource():
            return make_rule(source, WarnOnce(f"{name}.rule {source.rule}"))
