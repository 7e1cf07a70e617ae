"""Steps of a response: where they end, and the tokens that end them. The standard library alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


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


def ends_of(steps: Sequence[str]) -> tuple[int, ...]:
    """Return the characters of the response up to the end of each step."""
    return tuple(accumulate(map(len, steps)))


def end_tokens(ends: Sequence[int], num_tokens: int, num_characters: Callable[[int], int]) -> list[int]:
    """Return the place of the token that completes each step; a step that ends with the text ends with the last token.

    num_characters: number of tokens from the first one → characters of their text.
    """
    if not num_tokens:
        return []
    whole = num_characters(num_tokens)
    counts = range(1, num_tokens + 1)
    return [num_tokens - 1 if end >= whole else bisect_left(counts, end, key=num_characters) for end in ends]
