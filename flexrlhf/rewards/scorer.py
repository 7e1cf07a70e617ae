"""The scores of one section (reward or cost) that come from no model: the weighted sum over its sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flexrlhf.config.reward_sources import FunctionSource, RuleSource, ServiceSource
from flexrlhf.rewards.base import NotApplicable, Sample, Score, Scores, StepScores, step_end_tokens
from flexrlhf.rewards.limits import ScoreSource
from flexrlhf.rewards.rules import make_rule
from flexrlhf.rewards.services import HttpService
from flexrlhf.rewards.worker_calls import call, load
from flexrlhf.rewards.workers import Workers, WorkerSource
from flexrlhf.user_code.call_failures import WarnOnce
from flexrlhf.user_code.deadline import Deadline

ExternalSource = FunctionSource | ServiceSource | RuleSource
"""A source that is no model."""


class Scorer:
    """All sources of one section that are no models, called at the same time.

    Nothing starts before the first ``score``.

    sources:           the sources, as the YAML has them
    name:              the section, for messages
    deadline_seconds:  limit of one ``score``, all sources together; a sample that is late has no score
    with_models:       whether models are further sources, so that a sample to which none of these applies has a score
    """

    def __init__(
        self, sources: Sequence[ExternalSource], name: str, deadline_seconds: float, with_models: bool = False
    ) -> None:
        self._settings, self._with_models = tuple(sources), with_models
        self._sources = [_make_source(source, name) for source in sources]
        self._deadline_seconds = deadline_seconds
        self._levels = {source.level for source in sources}

    def score(self, samples: Sequence[Sample]) -> Scores:
        """Return the scores of ``samples``, which may be none.

        Takes ``deadline_seconds`` at most, and a few to end calls that hang.
        """
        if not samples or not self._sources:
            return Scores([0.0] * len(samples), None if self._levels <= {"answer"} else [], 0)
        deadline = Deadline.after(self._deadline_seconds)
        with ThreadPoolExecutor(len(self._sources)) as threads:
            columns = list(threads.map(lambda source: source.score(samples, deadline), self._sources))
        rows = [self._scored(row) for row in zip(*columns, strict=True)]
        return Scores(
            totals=[self._total(row) for row in rows],
            tokens=[self._tokens(row, sample) for row, sample in zip(rows, samples, strict=True)]
            if self._levels & {"token", "step"}
            else None,
            failed=sum(None in row for row in rows),
            ends=[_ends(row, sample) for row, sample in zip(rows, samples, strict=True)]
            if "step" in self._levels
            else None,
        )

    def close(self) -> None:
        """End the processes of the sources, within a few seconds."""
        for source in self._sources:
            source.close()

    def _scored(self, row: tuple[Score, ...]) -> tuple[Score, ...]:
        """Return the scores of one sample, or none at all where no source applies to it."""
        is_applicable = self._with_models or any(not isinstance(score, NotApplicable) for score in row)
        return row if is_applicable else (None,) * len(row)

    def _total(self, row: Sequence[Score]) -> float:
        if None in row:
            return math.nan
        return sum(
            source.weight * _total(score)
            for source, score in zip(self._settings, row, strict=True)
            if score is not None
        )

    def _tokens(self, row: Sequence[Score], sample: Sample) -> list[float]:
        """Return one number a token; the score of a whole response is added to its last token, a step's to its own."""
        if None in row:
            return [math.nan] * sample.num_tokens
        tokens = [0.0] * sample.num_tokens
        for source, score in zip(self._settings, row, strict=True):
            if isinstance(score, list):
                tokens = [token + source.weight * value for token, value in zip(tokens, score, strict=True)]
            elif isinstance(score, StepScores):
                places = step_end_tokens(score.ends, sample.num_tokens, sample.num_characters)
                for place, value in zip(places, score.values, strict=bool(tokens)):
                    tokens[place] += source.weight * value
            elif isinstance(score, float) and tokens:
                tokens[-1] += source.weight * score
        return tokens


def _total(score: float | list[float] | StepScores | NotApplicable) -> float:
    if isinstance(score, NotApplicable):
        return 0.0
    if isinstance(score, StepScores):
        return sum(score.values)
    return sum(score) if isinstance(score, list) else score


def _ends(row: Sequence[Score], sample: Sample) -> set[int]:
    """Return the places of the tokens that end a step, by any source; none without scores."""
    if None in row:
        return set()
    ends = [end for score in row if isinstance(score, StepScores) for end in score.ends]
    return set(step_end_tokens(ends, sample.num_tokens, sample.num_characters))


def _make_source(source: ExternalSource, name: str) -> ScoreSource:
    match source:
        case FunctionSource():
            workers = Workers(source.workers, source.timeout_seconds, partial(load, source.function))
            warn = WarnOnce(f"{name}.function {source.function}")
            function = partial(call, source.function, source.level)
            return WorkerSource(function, workers, source.batch_size, warn, source.separator)
        case ServiceSource():
            return HttpService(source, WarnOnce(f"{name}.url {', '.join(source.url)}"))
        case RuleSource():
            return make_rule(source, WarnOnce(f"{name}.rule {source.rule}"))
