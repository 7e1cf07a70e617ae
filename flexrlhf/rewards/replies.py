"""Scores from the reply of a function or a service. Worker processes load this.

| returned                                    | score                                     |
|---------------------------------------------|-------------------------------------------|
| a number, also NaN and infinity             | that number                               |
| None (null) for a response                  | none for that response                    |
| None of a function in TRL's form            | NotApplicable: adds nothing               |
| level token: a list of another length       | none for that response                    |
| level token: a list with None               | none for that response                    |
| level step: the same, or ends out of order  | none for that response                    |
| a text, a mapping ... instead of a number   | BadReply: none for the batch              |
| no list, or one of another length           | BadReply: none for the batch              |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flexrlhf.rewards.base import NotApplicable, Reply, Score, ScoreBatch, StepScores, step_ends
from flexrlhf.user_code.call_failures import BadReply, CallFailure

NO_SCORE = CallFailure("none", "returned no score for a response")


def read_reply(reply: Any, batch: ScoreBatch, level: str) -> Reply:
    """Return the scores of a batch. Raises BadReply."""
    values = _as_list(reply, "scores")
    if len(values) != len(batch):
        raise BadReply(f"returned {len(values)} scores for {len(batch)} responses")
    if level == "token":
        return _reply([_tokens(value, count) for value, count in zip(values, batch.num_tokens, strict=True)])
    if level == "step" and batch.steps is not None:
        return _reply([_steps(value, steps) for value, steps in zip(values, batch.steps, strict=True)])
    if level == "step":
        return _reply([_ended_steps(value, text) for value, text in zip(values, batch.responses, strict=True)])
    return _reply([_number(value) for value in values])


def read_applicable(reply: Any, batch: ScoreBatch, level: str) -> Reply:
    """Return the scores of a batch by a source whose None means that it does not apply. Raises BadReply."""
    values = _as_list(reply, "scores")
    read = read_reply(values, batch, level)
    scores = [NotApplicable() if value is None else score for value, score in zip(values, read.scores, strict=True)]
    return Reply(scores, read.failure if None in scores else None)


def _reply(scores: Sequence[Score | CallFailure]) -> Reply:
    failure = next((score for score in scores if isinstance(score, CallFailure)), None)
    return Reply([None if isinstance(score, CallFailure) else score for score in scores], failure)


def _number(value: Any) -> float | CallFailure:
    if value is None:
        return NO_SCORE
    if isinstance(value, str | bytes):
        raise BadReply(f"returned {value!r:.60} instead of a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise BadReply(f"returned {value!r:.60} instead of a number") from None


def _tokens(value: Any, count: int) -> list[float] | CallFailure:
    if value is None:
        return NO_SCORE
    numbers = [_number(number) for number in _as_list(value, "numbers, one a token")]
    if len(numbers) != count:
        return CallFailure("tokens", f"returned {len(numbers)} numbers for a response of {count} tokens")
    missing = next((number for number in numbers if isinstance(number, CallFailure)), None)
    return missing or [number for number in numbers if isinstance(number, float)]


def _steps(value: Any, steps: Sequence[str]) -> StepScores | CallFailure:
    if value is None:
        return NO_SCORE
    numbers = [_number(number) for number in _as_list(value, "numbers, one a step")]
    if len(numbers) != len(steps):
        return CallFailure("steps", f"returned {len(numbers)} numbers for a response of {len(steps)} steps")
    return _scored_steps(step_ends(steps), numbers)


def _ended_steps(value: Any, response: str) -> StepScores | CallFailure:
    """Read pairs of a step's end, in characters of ``response``, and its score."""
    if value is None:
        return NO_SCORE
    pairs = [_as_list(pair, "pairs of end and score") for pair in _as_list(value, "pairs of end and score")]
    if any(len(pair) != 2 or not isinstance(pair[0], int) for pair in pairs):
        raise BadReply(f"returned {value!r:.60} instead of pairs of a step's end, in characters, and its score")
    ends = tuple(end for end, _ in pairs)
    if list(ends) != sorted(set(ends)) or any(not 0 < end <= len(response) for end in ends):
        return CallFailure("ends", f"returned step ends {list(ends)!r:.60} in a response of {len(response)} characters")
    return _scored_steps(ends, [_number(score) for _, score in pairs])


def _scored_steps(ends: tuple[int, ...], numbers: Sequence[float | CallFailure]) -> StepScores | CallFailure:
    missing = next((number for number in numbers if isinstance(number, CallFailure)), None)
    return missing or StepScores(ends, tuple(number for number in numbers if isinstance(number, float)))


def _as_list(value: Any, content: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadReply(f"returned {value!r:.60} instead of a list of {content}")
    return list(value)
