"""Input and output of a source of scores. Worker processes load this: the standard library alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

from flexrlhf.user_code.call_failures import CallFailure


@dataclass(frozen=True)
class StepScores:
    """Scores of the steps of one response.

    ends:    characters of the response up to the end of each step, ascending
    values:  score of each step
    """

    ends: tuple[int, ...]
    values: tuple[float, ...]


def split_steps(response: str, separator: str) -> list[str]:
    """Split a response behind each ``separator``; joined, the steps are the response.

    A piece with nothing but blanks is a part of the step before it, or of the first one.
    """
    *closed, last = response.split(separator)
    steps: list[str] = []
    is_blank_so_far = True
    for piece in (*(piece + separator for piece in closed), last):
        is_blank = not piece.removesuffix(separator).strip()
        if steps and (is_blank or is_blank_so_far):
            steps[-1] += piece
        else:
            steps.append(piece)
        is_blank_so_far = is_blank_so_far and is_blank
    return steps


def step_ends(steps: Sequence[str]) -> tuple[int, ...]:
    """Return the characters of the response up to the end of each step."""
    return tuple(accumulate(map(len, steps)))


def step_end_tokens(ends: Sequence[int], num_tokens: int, num_characters: Callable[[int], int]) -> list[int]:
    """Return the place of the token that completes each step; a step that ends with the text ends with the last token.

    num_characters: number of tokens from the first one → characters of their text.
    """
    if not num_tokens:
        return []
    whole = num_characters(num_tokens)
    counts = range(1, num_tokens + 1)
    return [num_tokens - 1 if end >= whole else bisect_left(counts, end, key=num_characters) for end in ends]


@dataclass(frozen=True)
class NotApplicable:
    """Score of a response that a source does not score: it adds nothing to the sum of the others."""


Score = float | list[float] | StepScores | NotApplicable | None
"""Score of one response by one source: a number, a number for each of its tokens or steps, or None without one."""


@dataclass(frozen=True)
class Sample:
    """A prompt with the response to score, as text (``rollout.special_tokens``).

    prompt:      text of the prompt
    response:    text of the response
    num_tokens:  tokens of the response, its end token included
    columns:     all columns of the prompt's row in the data file
    num_characters: number of tokens from the first one → characters of their text, for the ends of steps
    token_ids:   the response as tokens, its end token included
    turns:       the prompt as messages, where it is a chat
    conversation: what follows the prompt of an episode, as messages of the assistant and the environment, those of its
                 reset first; empty for a response of one turn
    """

    prompt: str
    response: str
    num_tokens: int
    columns: Mapping[str, Any]
    num_characters: Callable[[int], int] = field(default=lambda _: 0, compare=False)
    token_ids: Sequence[int] = ()
    turns: Sequence[Mapping[str, str]] = ()
    conversation: Sequence[Mapping[str, str]] = ()

    def step_ends(self, separator: str) -> set[int]:
        """Return the places of the tokens that end a step of the response."""
        ends = step_ends(split_steps(self.response, separator))
        return set(step_end_tokens(ends, self.num_tokens, self.num_characters))


@dataclass(frozen=True)
class Scores:
    """Scores of samples, each the weighted sum over the sources.

    totals:  one a sample; NaN if a source returned NaN or no score
    tokens:  for each sample one number a token, where a source has level token or step; else None
    failed:  number of samples without a score of every source (calls that hung or crashed, unusable replies)
    ends:    for each sample the places of the tokens that end a step, where a source has level step; else None
    """

    totals: list[float]
    tokens: list[list[float]] | None
    failed: int
    ends: list[set[int]] | None = None


@dataclass(frozen=True)
class Reply:
    """Scores of one batch by one source.

    scores:   one a sample
    failure:  the first reason, where scores are None
    """

    scores: list[Score]
    failure: CallFailure | None = None

    @classmethod
    def failed(cls, batch: ScoreBatch, failure: CallFailure) -> Self:
        """Return the reply of a call that failed: no score for any sample."""
        return cls([None] * len(batch), failure)

    @property
    def as_json(self) -> list[Any]:
        """Scores as a service returns them: null without one."""
        return [_as_json(score) for score in self.scores]


@dataclass(frozen=True)
class ScoreBatch:
    """The samples of one call, column by column.

    prompts:     texts of the prompts
    responses:   texts of the responses
    num_tokens:  tokens of the responses, end tokens included
    columns:     the data rows' columns as lists, None if a row lacks one
    steps:       the responses split into steps, where the source has a separator
    token_ids:   tokens of the responses, end tokens included
    chats:       the prompts as messages; empty for a prompt that is no chat
    conversations: turns of episodes as messages; None without an environment
    """

    prompts: list[str]
    responses: list[str]
    num_tokens: list[int]
    columns: dict[str, list[Any]]
    steps: list[list[str]] | None = None
    token_ids: list[list[int]] = field(default_factory=list)
    chats: list[list[dict[str, str]]] = field(default_factory=list)
    conversations: list[list[dict[str, str]]] | None = None

    def __len__(self) -> int:
        return len(self.prompts)


def make_batch(samples: Sequence[Sample], separator: str | None = None) -> ScoreBatch:
    """Return ``samples`` column by column. ``separator``: of the steps; None: they are not split."""
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    return ScoreBatch(
        prompts=[sample.prompt for sample in samples],
        responses=[sample.response for sample in samples],
        num_tokens=[sample.num_tokens for sample in samples],
        columns={name: [sample.columns.get(name) for sample in samples] for name in names},
        steps=None if separator is None else [split_steps(sample.response, separator) for sample in samples],
        token_ids=[list(sample.token_ids) for sample in samples],
        chats=[[dict(turn) for turn in sample.turns] for sample in samples],
        conversations=[[dict(turn) for turn in sample.conversation] for sample in samples]
        if any(sample.conversation for sample in samples)
        else None,
    )


def make_batches(samples: Sequence[Sample], batch_size: int, separator: str | None = None) -> list[ScoreBatch]:
    """Split ``samples`` into batches of at most ``batch_size``. ``separator``: as in ``make_batch``."""
    return [make_batch(samples[start : start + batch_size], separator) for start in range(0, len(samples), batch_size)]


def _as_json(score: Score) -> Any:
    match score:
        case StepScores(values=values):
            return list(values)
        case NotApplicable():
            return None
    return score
