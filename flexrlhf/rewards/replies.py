"""Scores from what a function or a service returned. Worker processes load this.

| returned                                    | score                                     |
|---------------------------------------------|-------------------------------------------|
| a number, also NaN and infinity             | that number                               |
| None (null) for a response                  | none for that response                    |
| level token: a list of another length       | none for that response                    |
| level token: a list with None               | none for that response                    |
| a text, a mapping ... instead of a number   | BadReply: none for the batch              |
| no list, or one of another length           | BadReply: none for the batch              |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flexrlhf.rewards.base import Reply, Score, ScoreFailure

NO_SCORE = ScoreFailure("none", "returned no score for a response")


class BadReply(ValueError):
    """A reply that is not a list of one score a response."""


def read_reply(reply: Any, num_tokens: Sequence[int], level: str) -> Reply:
    """Return the scores of a batch whose responses have ``num_tokens`` tokens. Raises BadReply."""
    values = _as_list(reply, "scores")
    if len(values) != len(num_tokens):
        raise BadReply(f"returned {len(values)} scores for {len(num_tokens)} responses")
    if level == "token":
        return _reply([_tokens(value, count) for value, count in zip(values, num_tokens, strict=True)])
    return _reply([_number(value) for value in values])


def _reply(scores: Sequence[Score | ScoreFailure]) -> Reply:
    failure = next((score for score in scores if isinstance(score, ScoreFailure)), None)
    return Reply([None if isinstance(score, ScoreFailure) else score for score in scores], failure)


def _number(value: Any) -> float | ScoreFailure:
    if value is None:
        return NO_SCORE
    if isinstance(value, str | bytes):
        raise BadReply(f"returned {value!r:.60} instead of a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadReply(f"returned {value!r:.60} instead of a number") from None


def _tokens(value: Any, count: int) -> list[float] | ScoreFailure:
    if value is None:
        return NO_SCORE
    numbers = [_number(number) for number in _as_list(value, "numbers, one a token")]
    if len(numbers) != count:
        return ScoreFailure("tokens", f"returned {len(numbers)} numbers for a response of {count} tokens")
    missing = next((number for number in numbers if isinstance(number, ScoreFailure)), None)
    return missing or [number for number in numbers if isinstance(number, float)]


def _as_list(value: Any, content: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadReply(f"returned {value!r:.60} instead of a list of {content}")
    return list(value)
